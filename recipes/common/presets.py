"""The command line of glue.py, and the papers' settings as defaults that any flag overrides.

houlsby2019: Houlsby et al. 2019 (arXiv 1902.00751) and its code, google-research/adapter-bert. The paper searches
learning rates 3e-5, 3e-4 and 3e-3, 3 and 20 epochs and sizes 8, 64 and 256, and reports the best of 5 seeds. The
initial weights have the paper's standard deviation, 1e-2; the code's is 1e-3. The code's Adam has no bias correction;
this one does. The code scores the last epoch, as --load_best_model_at_end false does.
mohebbi2020: the re-implementation of Mohebbi and Rajaei 2020: "not shared", or with --share_layers 1 or 3 "shared in
each layer" and "3-shared", which train neither norms nor a second layer of the head.
uva2019: the reproduction of Whritenour and Schoch 2019, with the first paper's code and one learning rate for all.
They print 2,379,264 trained parameters of 111,863,042, which are --train_layer_norm false; a run's numbers have 1,538
more each, those of the head, which it trains in a copy.
han2021: Han, Pang and Wu 2021, with the defaults of AdapterHub's library, whose initial weights are not truncated.

--method full and top_k have their own learning rate and epochs. These papers have no settings for LoRA, the norms
alone and the head alone, which use those of the adapters.
"""

import copy
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers.hf_argparser import HfArg

from common import demo
from common.arguments import (
    ClassifierArguments,
    ClassifierMethodArguments,
    EncoderArguments,
    RecipeParser,
    RecipeTrainingArguments,
)
from common.edge import RecipeError
from common.glue_tasks import MINIMAL_PAIRS, find_tasks


_LARGE, _BASE = "google-bert/bert-large-uncased", "google-bert/bert-base-uncased"
# Over all processes and accumulated steps.
BATCH = 32
# Common to all four, which also keep BERT's own dropout, as the recipe does by default.
_ALL = {
    "r": 64, "dropout": 0.0, "lr_scheduler_type": "linear", "max_grad_norm": 1.0, "train_sampling_strategy": "random",
    "base_dtype": "float32", "keep_prefix": "off",
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
        aliases=["--task_name"],
        default=MINIMAL_PAIRS,
        help="cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli, all (of these), or minimal_pairs.",
    )
    data_dir: str | None = HfArg(default=None, help="Folder with a folder of files per task; default: the Hub.")
    preset: Literal["houlsby2019", "mohebbi2020", "uva2019", "han2021"] | None = HfArg(
        default=None, help="A paper's settings instead of the defaults; see recipes/common/presets.py."
    )
    predict: bool = HfArg(default=False, help="Write predictions of the test splits in the format of GLUE's server.")


Task = TypeVar("Task", bound=GlueArguments)


def parse_arguments(
    args: Sequence[str] | None = None, kind: type[Task] = GlueArguments, recipe: str = "glue.py"
) -> tuple[Task, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments]:
    """Parse the command line, or `args`, and check what does not depend on the data.

    A preset and the run without data have their own defaults, which flags override. With --evaluate, the encoder and
    the length of texts are None unless they are given: then they are those of the saved adapter.

    Args:
        args: The words of a command line; default: those of this process.
        kind: The dataclass of the task and the encoder.
        recipe: The script, for its usage.
    """
    groups = (kind, ClassifierMethodArguments, ClassifierArguments, RecipeTrainingArguments)
    parser = RecipeParser(groups, usage=f"accelerate launch recipes/{recipe} [flags]")
    arguments, method, adapter, training = parser.parse(args, _defaults)
    tasks = find_tasks(arguments.task)
    if arguments.evaluate is None and training.do_train:
        method.check(adapter, training)
    if arguments.predict and MINIMAL_PAIRS in (task.name for task in tasks):
        raise RecipeError(f"--predict needs a task of GLUE, whose test split has no labels; got {MINIMAL_PAIRS}.")
    if arguments.data_dir is not None:
        if arguments.task == MINIMAL_PAIRS:
            raise RecipeError(f"--data_dir has no use for {MINIMAL_PAIRS}, which are generated: also give --task.")
        folder = Path(arguments.data_dir).expanduser()
        if missing := [task.name for task in tasks if not (folder / task.name).is_dir()]:
            raise RecipeError(f"--data_dir must hold a folder per task, {folder} has no {missing[0]}. Add it.")
    for task in tasks:
        copy.copy(training).choose_by(task.scores)
        if len(task.labels) == 1 and training.label_smoothing_factor:
            raise RecipeError(f"--label_smoothing_factor is for classes, {task.name} has scores. Leave it out.")
    return arguments, method, adapter, training


def _defaults(given: Namespace) -> dict[str, Any]:
    """Return the defaults of a preset, or of the run without data, by what else the command line says."""
    if given.preset is None:
        return demo.DEFAULTS if given.task == MINIMAL_PAIRS else {}
    defaults = preset(given.preset, given.method, given.share_layers)
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(BATCH, devices * given.gradient_accumulation_steps)
    if not rest:
        return {**defaults, "per_device_train_batch_size": share}
    if given.per_device_train_batch_size != RecipeTrainingArguments.per_device_train_batch_size:
        return defaults
    raise RecipeError(
        f"--preset has a batch of {BATCH}, which cannot be split evenly over {devices} devices times "
        f"{given.gradient_accumulation_steps} accumulated steps. Use a number that divides {BATCH}, or give "
        "--per_device_train_batch_size for another batch."
    )
