"""The command line of glue.py, and the papers' settings as defaults that any flag overrides.

houlsby2019: Houlsby et al. 2019 (arXiv 1902.00751) and its code, google-research/adapter-bert. The paper searches
learning rates 3e-5, 3e-4 and 3e-3, 3 and 20 epochs and sizes 8, 64 and 256, and reports the best of 5 seeds. The
code's Adam has no bias correction; this one does.
mohebbi2020: the re-implementation of Mohebbi and Rajaei 2020: "not shared", or with --share_layers 1 or 3 "shared in
each layer" and "3-shared", which train neither norms nor a second layer of the head.
uva2019: the reproduction of Whritenour and Schoch 2019, with the first paper's code and one learning rate for all.
han2021: Han, Pang and Wu 2021, with the defaults of AdapterHub's library.

--method full and top_k have their own learning rate and epochs. These papers have no settings for LoRA, the norms
alone and the head alone, which use those of the adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers.hf_argparser import HfArg

from tasks import demo
from tasks.glue import MINIMAL_PAIRS
from training.arguments import ClassifierArguments, EncoderArguments, RecipeParser, RecipeTrainingArguments
from training.errors import RecipeError
from training.methods import MethodArguments


_LARGE, _BASE = "google-bert/bert-large-uncased", "google-bert/bert-base-uncased"
# Over all processes and accumulated steps.
BATCH = 32
# Common to all four, which also keep BERT's own dropout, as the recipe does by default.
_ALL = {
    "r": 64, "dropout": 0.0, "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "train_sampling_strategy": "random",
}  # fmt: skip
_HOULSBY_CODE = {
    "activation": "gelu", "train_layer_norm": "all", "head": "linear", "max_length": 128, "warmup_steps": 0.1,
    "weight_decay": 0.01, "adam_epsilon": 1e-6,
}  # fmt: skip
_PRESETS: dict[str, dict[str, Any]] = {
    "houlsby2019": {
        **_HOULSBY_CODE, "model_name": _LARGE, "init_std": 1e-2, "learning_rate": 3e-4, "num_train_epochs": 20,
    },
    "mohebbi2020": {
        "model_name": _BASE, "activation": "gelu", "init_std": 1e-3, "train_layer_norm": "true", "head": "two_layer",
        "warmup_steps": 0.1, "learning_rate": 3e-4, "num_train_epochs": 10,
    },
    "uva2019": {
        **_HOULSBY_CODE, "model_name": _BASE, "init_std": 1e-3, "learning_rate": 2e-5, "num_train_epochs": 15,
    },
    "han2021": {
        "model_name": _BASE, "r": 48, "activation": "swish", "init_std": 0.02, "train_layer_norm": "false",
        "head": "linear", "max_length": 256, "warmup_steps": 0, "weight_decay": 0.0, "adam_epsilon": 1e-8,
        "learning_rate": 1e-4, "num_train_epochs": 20,
    },
}  # fmt: skip
_WHEN_SHARED = {"mohebbi2020": {"train_layer_norm": "false", "head": "linear"}}
_WITHOUT_ADAPTERS = {"mohebbi2020": {"head": "linear"}}
# Neither paper gives these for fine-tuning on GLUE; they are from the first one's grid for fine-tuning on SQuAD.
_NOT_GIVEN = {"learning_rate": 3e-5, "num_train_epochs": 3}
_WHEN_FINE_TUNED = {
    "houlsby2019": _NOT_GIVEN,
    "mohebbi2020": _NOT_GIVEN,
    "han2021": {"learning_rate": 2e-5, "num_train_epochs": 10, "max_length": 128},
}
NAMES = tuple(_PRESETS)


def preset(name: str, method: str, share_layers: int) -> dict[str, Any]:
    """Return the defaults, by argument, of a paper's runs of this method, except for the batch, which is BATCH."""
    defaults = _ALL | _PRESETS[name]
    if share_layers:
        defaults |= _WHEN_SHARED.get(name, {})
    if method != "houlsby":
        defaults |= _WITHOUT_ADAPTERS.get(name, {})
    if method in ("full", "top_k"):
        defaults |= _WHEN_FINE_TUNED.get(name, {})
    return defaults


@dataclass
class GlueArguments(EncoderArguments):
    """The task and the encoder."""

    _argument_group_name = "task"

    task: str = HfArg(
        default=MINIMAL_PAIRS,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, all (of these), or minimal_pairs.",
    )
    data_dir: str | None = HfArg(default=None, help="Folder with a folder of files per task; default: the Hub.")
    preset: Literal["houlsby2019", "mohebbi2020", "uva2019", "han2021"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/study/presets.py."
    )
    max_train_samples: int | None = HfArg(default=None, help="Train on a random sample of this many examples.")
    evaluate: str | None = HfArg(
        default=None, help="Score this saved adapter or model (a folder, or a name on the Hub) instead of training."
    )
    predict: bool = HfArg(default=False, help="Write predictions of the test splits in the format of GLUE's server.")


def parse_arguments() -> tuple[GlueArguments, MethodArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Parse the command line. A preset and the run without data have their own defaults, which flags override."""
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
    """Return the encoder and the adapter that glue.py has with these flags; other flags are ignored."""
    parser = RecipeParser((GlueArguments, ClassifierArguments))

    def parse() -> tuple[GlueArguments, ClassifierArguments]:
        arguments, adapter, *_ = parser.parse_args_into_dataclasses(list(flags), return_remaining_strings=True)
        return arguments, adapter

    arguments, adapter = parse()
    if arguments.preset is not None:
        parser.set_defaults(**preset(arguments.preset, "houlsby", adapter.share_layers))
    return parse()


def _with_batch(parser: RecipeParser, training: RecipeTrainingArguments) -> tuple[Any, ...]:
    """Parse again, with the presets' batch split over all devices and accumulated steps.

    Raises:
        RecipeError: If it cannot be split evenly, and no other batch is given.
    """
    devices = training.world_size * max(1, training.n_gpu)
    share, rest = divmod(BATCH, devices * training.gradient_accumulation_steps)
    parser.set_defaults(per_device_train_batch_size=0 if rest else share)  # 0: no size fits
    parsed = parser.parse()
    if rest and parsed[-1].per_device_train_batch_size == 0:
        raise RecipeError(
            f"--preset has a batch of {BATCH}, which cannot be split evenly over {devices} devices times "
            f"{training.gradient_accumulation_steps} accumulated steps. Use a number that divides {BATCH}, or give "
            "--per_device_train_batch_size for another batch."
        )
    return parsed
