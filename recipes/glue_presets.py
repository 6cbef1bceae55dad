"""The papers' settings on GLUE, as defaults that any flag overrules.

houlsby2019: Houlsby et al. 2019 (arXiv 1902.00751) and its code, google-research/adapter-bert. The paper searches
learning rates 3e-5, 3e-4 and 3e-3, 3 and 20 epochs and sizes 8, 64 and 256, and takes the best of 5 seeds. The code's
Adam has no bias correction; this one has.
mohebbi2020: the re-implementation of Mohebbi and Rajaei 2020: "not shared", or with --share_layers 1 or 3 "shared in
each layer" and "3-shared", which train neither norms nor a second layer of the head.
uva2019: the reproduction of Whritenour and Schoch 2019, with the code of the first and one learning rate for all.
han2021: Han, Pang and Wu 2021, with the defaults of AdapterHub's library.

--method full and top_k have a learning rate and epochs of their own. LoRA, the norms alone and the head alone, which
these papers have no settings for, take those of the adapters.
"""

from typing import Any


_LARGE, _BASE = "google-bert/bert-large-uncased", "google-bert/bert-base-uncased"
# Of all processes and accumulated steps together.
BATCH = 32
# What else all four have in common, and the defaults of the recipe for BERT's own dropout, which all of them keep.
_ALL = {
    "r": 64,
    "dropout": 0.0,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "train_sampling_strategy": "random",
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
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_epsilon": 1e-8,
        "learning_rate": 1e-4,
        "num_train_epochs": 20,
    },
}
_WHEN_SHARED = {"mohebbi2020": {"train_layer_norm": "false", "head": "linear"}}
_WITHOUT_ADAPTERS = {"mohebbi2020": {"head": "linear"}}
# Neither paper gives them for fine-tuning on GLUE. They are of the first one's grid for fine-tuning on SQuAD.
_NOT_GIVEN = {"learning_rate": 3e-5, "num_train_epochs": 3}
_WHEN_FINE_TUNED = {
    "houlsby2019": _NOT_GIVEN,
    "mohebbi2020": _NOT_GIVEN,
    "han2021": {"learning_rate": 2e-5, "num_train_epochs": 10, "max_length": 128},
}
NAMES = tuple(_PRESETS)


def preset(name: str, method: str, share_layers: int) -> dict[str, Any]:
    """The defaults, by argument, of a paper's runs of this method, all but the batch, which is BATCH in all."""
    defaults = _ALL | _PRESETS[name]
    if share_layers:
        defaults |= _WHEN_SHARED.get(name, {})
    if method != "houlsby":
        defaults |= _WITHOUT_ADAPTERS.get(name, {})
    if method in ("full", "top_k"):
        defaults |= _WHEN_FINE_TUNED.get(name, {})
    return defaults
