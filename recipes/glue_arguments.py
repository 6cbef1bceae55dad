"""The GLUE recipe's command line."""

from dataclasses import dataclass
from typing import Literal

import demo
from common.arguments import AdapterArguments, EncoderArguments, RecipeParser, RecipeTrainingArguments
from common.methods import MethodArguments
from glue_presets import preset
from glue_tasks import MINIMAL_PAIRS
from transformers.hf_argparser import HfArg


@dataclass
class GlueArguments(EncoderArguments):
    """What to train on, and which encoder."""

    _argument_group_name = "task"

    task: str = HfArg(
        default=MINIMAL_PAIRS,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, all of them, or the generated pairs.",
    )
    data_dir: str | None = HfArg(default=None, help="Folder with a folder of files per task; default: the Hub.")
    preset: Literal["houlsby2019", "mohebbi2020", "uva2019", "han2021"] | None = HfArg(
        default=None, help="A paper's settings in place of the defaults; see glue_presets.py."
    )
    max_train_samples: int | None = HfArg(default=None, help="Train on this many examples only, drawn at random.")
    evaluate: str | None = HfArg(
        default=None, help="Score this saved adapter or model (a folder, or a name on the Hub), and train nothing."
    )
    predict: bool = HfArg(default=False, help="Write GLUE's files of predictions for the test split.")


def parse_arguments() -> tuple[GlueArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments]:
    """Reads the command line; a run without data and a preset have defaults of their own, which flags overrule."""
    groups = (GlueArguments, MethodArguments, AdapterArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/glue.py [flags]")
    arguments, method, adapter, _ = parsed = parser.parse()
    defaults = demo.DEFAULTS if arguments.task == MINIMAL_PAIRS else {}
    if arguments.preset is not None:
        defaults = preset(arguments.preset, method.method, adapter.share_layers)
    if not defaults:
        return parsed
    parser.set_defaults(**defaults)
    return parser.parse()
