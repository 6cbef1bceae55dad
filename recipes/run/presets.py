"""The papers' settings, as defaults that any flag overrides; this file imports no PyTorch, as
sweep.py reads it.

houlsby2019: Houlsby et al. 2019 (arXiv 1902.00751) and its code, google-research/adapter-bert. The
paper searches learning rates 3e-5, 3e-4 and 3e-3, 3 and 20 epochs and sizes 8, 64 and 256, and
reports the best of 5 seeds. The initial weights have the paper's standard deviation, 1e-2; the
code's is 1e-3. The code's Adam has no bias correction; this one does. The code scores the last
epoch, as --load_best_model_at_end false does.
mohebbi2020: the re-implementation of Mohebbi and Rajaei 2020: "not shared", or with --share_layers
1 or 3 "shared in each layer" and "3-shared", which train neither norms nor a second layer of the
head.
uva2019: the reproduction of Whritenour and Schoch 2019, with the first paper's code and one
learning rate for all. They print 2,379,264 trained parameters of 111,863,042, the adapters alone;
the code trains the norms and the head as well, and so does the preset.
han2021: Han, Pang and Wu 2021, with the defaults of AdapterHub's library, whose initial weights are
not truncated. The warm-up is the one of Mosbach et al. 2020, whom the paper follows for the model
with adapters.

--method full and top_k have their own learning rate and epochs. These papers have no settings for
LoRA, the norms alone and the head alone, which use those of the adapters. paper_tasks.py and
squad.py have presets of the papers that ran their tasks; of a grid, the preset has one point.

The first and the third paper computed on TPUs, whose products of float32 are in bfloat16, the
second on a GPU of Google Colab; the last does not say. The presets compute in float32.
On a GPU, --tf32 true is closest to a TPU's products and several times faster, and --bf16 true is
faster again.
"""

import os
from argparse import Namespace
from typing import Any

from run.edge import RecipeError


_LARGE, _BASE = "google-bert/bert-large-uncased", "google-bert/bert-base-uncased"
# Over all processes and accumulated steps.
BATCH = 32
# Common to all four but for han2021's r. They also keep BERT's own dropout, as the recipe does by
# default.
_ALL = {
    "r": 64,
    "dropout": 0.0,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "random",
    "base_dtype": "float32",
}
_HOULSBY_CODE = {
    "activation": "gelu",
    "train_layer_norm": "all",
    "head": "linear",
    "max_length": 128,
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "adam_epsilon": 1e-6,
}
_PRESETS: dict[str, dict[str, Any]] = {
    "houlsby2019": {
        **_HOULSBY_CODE,
        "model_name": _LARGE,
        "init_std": 1e-2,
        "learning_rate": 3e-4,
        "num_train_epochs": 20,
    },
    "mohebbi2020": {
        "model_name": _BASE,
        "activation": "gelu",
        "init_std": 1e-3,
        "train_layer_norm": "true",
        "head": "two_layer",
        "warmup_steps": 0.1,
        "learning_rate": 3e-4,
        "num_train_epochs": 10,
    },
    "uva2019": {
        **_HOULSBY_CODE,
        "model_name": _BASE,
        "init_std": 1e-3,
        "learning_rate": 2e-5,
        "num_train_epochs": 15,
    },
    "han2021": {
        "model_name": _BASE,
        "r": 48,
        "activation": "swish",
        "init_std": 0.02,
        "train_layer_norm": "false",
        "head": "linear",
        "max_length": 256,
        "warmup_steps": 0.1,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-8,
        "learning_rate": 1e-4,
        "num_train_epochs": 20,
    },
}
_WHEN_SHARED = {"mohebbi2020": {"train_layer_norm": "false", "head": "linear"}}
_WITHOUT_ADAPTERS = {"mohebbi2020": {"head": "linear"}}
# Neither paper gives these for fine-tuning on GLUE; they are from the first one's grid for
# fine-tuning on SQuAD.
_NOT_GIVEN = {"learning_rate": 3e-5, "num_train_epochs": 3}
_WHEN_FINE_TUNED = {
    "houlsby2019": _NOT_GIVEN,
    "mohebbi2020": _NOT_GIVEN,
    "han2021": {
        "learning_rate": 2e-5,
        "num_train_epochs": 10,
        "max_length": 128,
        "warmup_steps": 0.0,
    },
}
# Where a recipe's tasks have other settings than GLUE, for adapters and then for fine-tuning; no
# paper gives those of fine-tuning on the 17 tasks, except the grid of the first.
OF_RECIPE: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "paper_tasks": {
        "houlsby2019": (
            {"model_name": _BASE, "learning_rate": 1e-4, "num_train_epochs": 50},
            {"model_name": _BASE, "learning_rate": 3e-5, "num_train_epochs": 20},
        ),
        "mohebbi2020": ({"learning_rate": 1e-4, "num_train_epochs": 50}, _NOT_GIVEN),
    },
    # The grid: sizes 2 to 256, rates 3e-5 to 1e-3, 3 to 20 epochs; for fine-tuning 3e-5 to 1e-4 and
    # 2 to 5 epochs.
    "squad": {
        "houlsby2019": (
            {"max_length": 384, "learning_rate": 3e-4, "num_train_epochs": 10},
            {"max_length": 384, **_NOT_GIVEN},
        ),
    },
}


def preset(name: str, method: str, share_layers: int, recipe: str = "glue") -> dict[str, Any]:
    """Return the defaults, by argument, of a paper's runs of this method, except for the batch,
    which is BATCH.
    """
    defaults = _ALL | _PRESETS[name]
    if share_layers:
        defaults |= _WHEN_SHARED.get(name, {})
    if method != "houlsby":
        defaults |= _WITHOUT_ADAPTERS.get(name, {})
    fine_tunes = method in ("full", "top_k")
    if recipe in OF_RECIPE:
        if name not in OF_RECIPE[recipe]:
            raise RecipeError(
                f"--preset must be one of {', '.join(OF_RECIPE[recipe])} for {recipe}; got {name}."
            )
        for_adapters, for_fine_tuning = OF_RECIPE[recipe][name]
        return defaults | (for_fine_tuning if fine_tunes else for_adapters)
    if fine_tunes:
        defaults |= _WHEN_FINE_TUNED.get(name, {})
    return defaults


def with_preset(flags: Namespace, recipe: str = "glue") -> dict[str, Any]:
    """Return the defaults of the preset that a command line names, with its batch split over all
    devices; none without a preset.
    """
    if flags.preset is None:
        return {}
    defaults = preset(flags.preset, flags.method, flags.share_layers, recipe)
    devices, steps = int(os.environ.get("WORLD_SIZE", "1")), flags.gradient_accumulation_steps
    if BATCH % (devices * steps) == 0:
        defaults["per_device_train_batch_size"] = BATCH // (devices * steps)
    elif flags.per_device_train_batch_size == BATCH:
        raise RecipeError(
            f"--preset has a batch of {BATCH}, which cannot be split evenly over {devices} devices "
            f"times {steps} accumulated steps. Use a number that divides {BATCH}, or give "
            "--per_device_train_batch_size for another batch."
        )
    # SQuAD has no choice of heads.
    return {name: value for name, value in defaults.items() if name in vars(flags)}
