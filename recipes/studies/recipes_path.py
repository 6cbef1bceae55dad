"""Let the scripts of this folder import `data`, `tasks` and `run` from the folder above.

Python looks for modules in the folder of the script that is started. Each script here imports this
module first, which adds the folder above.
"""

import sys
from pathlib import Path


RECIPES = Path(__file__).parents[1]
sys.path.insert(1, str(RECIPES))
