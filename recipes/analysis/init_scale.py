"""Run recipes/init_scale.py; `python recipes/analysis/init_scale.py` is the same command."""

import os
import sys
from pathlib import Path


if __name__ == "__main__":
    script = Path(__file__).parents[1] / Path(__file__).name
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[1:]])
