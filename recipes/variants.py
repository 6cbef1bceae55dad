"""Train a variant of the adapter that Houlsby et al. 2019 tried without gain (section 3.6), with glue.py.

    accelerate launch recipes/variants.py --variant layer_norm --task cola --output_dir runs/cola-norm

The flags are those of glue.py, and --variant. The library does not know the variants that are classes in
analysis/variants.py: their adapters are saved but cannot be loaded, so give --save_strategy no
--load_best_model_at_end false. The score in results.json is the best epoch's nevertheless.
"""

import runpy
import sys
from pathlib import Path

from analysis.variants import VARIANTS, with_variant
from training import methods
from training.rules import OneLineErrors


def main() -> None:
    """Take --variant from the command line, and run glue.py with the rest."""
    parser = OneLineErrors(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    arguments, flags = parser.parse_known_args()
    sys.argv = [sys.argv[0], *flags]
    original = methods.apply_method
    methods.apply_method = with_variant(VARIANTS[arguments.variant], original)
    try:
        runpy.run_path(str(Path(__file__).with_name("glue.py")), run_name="__main__")
    finally:
        methods.apply_method = original


if __name__ == "__main__":
    main()
