"""The GLUE recipe's command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import demo
from common.arguments import ClassifierArguments, EncoderArguments, RecipeParser, RecipeTrainingArguments
from common.errors import RecipeError
from common.methods import MethodArguments
from glue_presets import BATCH, preset
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


def parse_arguments() -> tuple[GlueArguments, MethodArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Reads the command line; a run without data and a preset have defaults of their own, which flags overrule."""
    groups = (GlueArguments, MethodArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage="accelerate launch recipes/glue.py [flags]")
    arguments, method, adapter, training = parsed = parser.parse()
    if arguments.preset is not None:
        parser.set_defaults(**preset(arguments.preset, method.method, adapter.share_layers))
        return _with_batch(parser, training)
    if arguments.task == MINIMAL_PAIRS:
        parser.set_defaults(**demo.DEFAULTS)
        return parser.parse()
    return parsed


def parse_adapter(flags: Sequence[str]) -> tuple[GlueArguments, ClassifierArguments]:
    """The encoder and the adapter that the recipe has with these flags; all others among them are left alone."""
    parser = RecipeParser((GlueArguments, ClassifierArguments))

    def parse() -> tuple[GlueArguments, ClassifierArguments]:
        arguments, adapter, *_ = parser.parse_args_into_dataclasses(list(flags), return_remaining_strings=True)
        return arguments, adapter

    arguments, adapter = parse()
    if arguments.preset is not None:
        parser.set_defaults(**preset(arguments.preset, "houlsby", adapter.share_layers))
    return parse()


def _with_batch(parser: RecipeParser, training: RecipeTrainingArguments) -> tuple[Any, ...]:
    """Parses once more, with the presets' batch split over all devices and accumulated steps.

    Raises:
        RecipeError: If it cannot be split evenly, and no other is given.
    """
    devices = training.world_size * max(1, training.n_gpu)
    share, rest = divmod(BATCH, devices * training.gradient_accumulation_steps)
    parser.set_defaults(per_device_train_batch_size=0 if rest else share)  # 0: none that would do
    parsed = parser.parse()
    if rest and parsed[-1].per_device_train_batch_size == 0:
        raise RecipeError(
            f"--preset has a batch of {BATCH}, which cannot be split evenly over {devices} devices times "
            f"{training.gradient_accumulation_steps} accumulated steps. Use a number of them that divides {BATCH}, or "
            "give --per_device_train_batch_size for another batch."
        )
    return parsed
