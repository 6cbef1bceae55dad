"""The adapter beneath ladders: a saved one, frozen, on whose hidden states they are trained.

It is in the layers of a model, but PEFT does not know it: nobody activates, trains or saves it. A
layer uses it for each adapter whose record names it. In a model it is called after its contents, so
that all ladders on it share one copy.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import torch

from .config import HoulsbyConfig
from .errors import AdapterError, HubError
from .heads.head import HoulsbyHead
from .method.modules import is_inside
from .method.tuner_layer import HoulsbyTunerLayer
from .placement.plan import Plan
from .saved.adapter import SavedAdapter
from .saved.naming import FILE_PREFIX, translate


_REMEDY = 'Its folder or repository is named as "beneath" in the adapter_config.json of the ladder.'


def open_beneath(config: HoulsbyConfig, token: str | None = None) -> SavedAdapter | None:
    """Open the adapter beneath a ladder; None if there is none.

    It stays opened for the configuration, so that a token is needed once.

    Raises:
        AdapterError: It is no adapter that may lie beneath a ladder, or not the one that the ladder
            was trained on.
        HubError: Its repository does not exist, is private or cannot be reached.
    """
    if config.beneath is None or config.opened_beneath is not None:
        return config.opened_beneath  # type: ignore[no-any-return]
    recorded = (config.loaded and config.loaded.record.beneath) or {}
    try:
        saved = SavedAdapter.open(config.beneath, recorded.get("commit"), token)
    except (AdapterError, HubError) as error:  # of a name that the user may never have given
        raise type(error)(f"The adapter beneath the ladder: {error} {_REMEDY}") from error
    options = saved.config
    if options.kind != "houlsby" or options.invertible or options.trainable_token_indices:
        raise AdapterError(
            "The adapter beneath a ladder must be of kind 'houlsby', without an invertible module "
            f"and trained tokens; {saved.name} is not (kind {options.kind!r}). Give another one as "
            "beneath."
        )
    if config.loaded is not None and recorded.get("sha256") != describe(saved)["sha256"]:
        raise AdapterError(
            "A ladder needs the adapter beneath it that it was trained on; "
            f"{saved.name} has changed since, or is another one. {_REMEDY}"
        )
    config.opened_beneath = saved
    return saved


def describe(saved: SavedAdapter) -> dict[str, str]:
    """Return what the file of a ladder records of the adapter beneath it.

    Its fingerprint is of the weights and of what else determines what the adapter computes.
    """
    options = [saved.config.activation, saved.config.scaling, saved.record.places]
    digest = hashlib.sha256(saved.weights_file.read_bytes())
    digest.update(json.dumps(options, sort_keys=True).encode())
    facts = {"sha256": digest.hexdigest()}
    if saved.commit is not None:
        facts["commit"] = saved.commit
    return facts


def add_beneath(tuner: Any, saved: SavedAdapter, name: str) -> None:
    """Add an adapter to the layers of a model as one that lies beneath ladders, unless it is there.

    Args:
        tuner: The `HoulsbyModel`.
        saved: The adapter, whose head is left out.
        name: Its name in the model.
    """
    model = tuner.model
    layers = [module for module in model.modules() if isinstance(module, HoulsbyTunerLayer)]
    if any(layer.has(name) for layer in layers):
        return
    if not layers:  # PEFT freezes a model only before it has layers
        model.requires_grad_(False)
    config = copy.deepcopy(saved.config)
    plan = Plan(model, config)
    plan.report_other_base()
    with torch.device("meta"):
        tuner.add_parts(plan, name, plan.places)
    weights = tuner._remap_adapter_state_dict_for_load(model, config, name, saved.weights)
    own = {key: weight for key, weight in weights.items() if f".{name}." in key}
    model.load_state_dict(own, strict=False, assign=True)
    tuner._cast_adapter_dtype(name)
    for module in model.modules():
        if isinstance(module, HoulsbyTunerLayer):
            module._move_adapter_to_device_of_base_layer(name)


def start_heads(plan: Plan, adapter_name: str, saved: SavedAdapter) -> None:
    """Begin the modules in the encoder that a ladder trains as a whole, such as BERT's pooler, as
    the adapter beneath it has them.
    """
    for name in plan.heads:
        head = plan.view.model.get_submodule(name)
        if not is_inside(name, plan.view.encoder) or not isinstance(head, HoulsbyHead):
            continue
        own = head.modules_to_save[adapter_name]
        names = {f"{name}.{part}": part for part in own.state_dict()}
        weights = {}
        for key, weight in translate(saved.weights, names, plan.view.encoder).items():
            part = names.get(key.removeprefix(FILE_PREFIX))
            if part is not None:
                weights[part] = weight
        if weights:
            own.load_state_dict(weights)
