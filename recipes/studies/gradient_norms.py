r"""Run a recipe and record the norm of the gradient of each layer, step by step.

    accelerate launch recipes/studies/gradient_norms.py recipes/glue.py --task rte \
        --output_dir runs/rte

It runs the recipe, glue.py if none is named, and writes gradient_norms.jsonl into its output
folder.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

from transformers import trainer

import recipes_path
from figures.gradients import GradientNorms


def main() -> None:
    """Run the recipe that the command line names first, or glue.py, with the callback."""
    recipe = recipes_path.RECIPES / "glue.py"
    if len(sys.argv) > 1 and sys.argv[1].endswith(".py"):
        recipe = Path(sys.argv.pop(1)).resolve()
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks.append(GradientNorms)
    sys.argv[0] = str(recipe)
    runpy.run_path(str(recipe), run_name="__main__")


if __name__ == "__main__":
    main()
