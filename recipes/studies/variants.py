"""Train a variant of the adapter that Houlsby et al. 2019 tried without gain (section 3.6), with
glue.py.

    accelerate launch recipes/studies/variants.py --variant layer_norm --task cola --output_dir
    runs/cola-norm

The flags are those of glue.py, and --variant. The library does not know the variants that are
classes in bottlenecks.py: their adapters are saved but cannot be loaded, so give
--save_strategy no --load_best_model_at_end false. `best_score` in results.json is then that of the
last epoch; figure.py takes the best of `epochs`.
"""

import runpy
from dataclasses import dataclass, replace

from transformers.hf_argparser import HfArg

import recipes_path
from bottlenecks import VARIANTS, made_of
from common.edge import end_with_one_line
from common.glue_tasks import GlueArguments, parse_arguments


@dataclass(kw_only=True)
class VariantArguments(GlueArguments):
    """The task, the encoder and the variant."""

    variant: str = HfArg(
        metadata={"choices": [*VARIANTS]}, help="What differs from the paper's adapter."
    )


def main() -> None:
    command = parse_arguments(kind=VariantArguments)
    changes, bottleneck = VARIANTS[command.arguments.variant]
    config = command.adapter.config
    command.adapter.config = lambda **fields: replace(config(**fields), **changes)
    glue = runpy.run_path(str(recipes_path.RECIPES / "glue.py"))
    with made_of(bottleneck):
        glue["run_tasks"](command)


if __name__ == "__main__":
    end_with_one_line(main)
