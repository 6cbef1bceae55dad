"""The norm of the gradient of each layer, step by step, which a callback records for a figure."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments


FILE = "gradient_norms.jsonl"


class GradientNorms(TrainerCallback):
    """Write the gradient's norm per layer, pooler and head whenever the Trainer logs.

    The file in the output folder has a JSON line per logged step: {"step": 50, "norms":
    {"bert.encoder.layer.0": 0.02, ..., "classifier": 0.3}}. Norms are those before clipping. With
    sharded gradients (FSDP, ZeRO) they are of the main process's shards.
    """

    def __init__(self) -> None:
        self.layers: dict[str, list[nn.Parameter]] = {}
        self.norms: dict[str, torch.Tensor] = {}

    def on_train_begin(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sort the trained parameters by layer.

        A new run starts a new file; a resumed one appends to it.
        """
        self.layers = {}
        for name, parameter in kwargs["model"].named_parameters():
            if parameter.requires_grad:
                self.layers.setdefault(layer_of(name), []).append(parameter)
        if state.is_world_process_zero and state.global_step == 0:
            file = _file_of(args)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    def on_pre_optimizer_step(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compute the norms, without waiting for the device."""
        self.norms = {}
        for layer, parameters in self.layers.items():
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                self.norms[layer] = torch.stack(torch._foreach_norm(gradients)).norm()

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the norms.

        The Trainer has scaled all gradients by one factor, and logs the total norm before that.
        """
        total = kwargs["logs"].get("grad_norm")
        if not self.norms or total is None or not state.is_world_process_zero:
            return
        clipped = {layer: norm.item() for layer, norm in self.norms.items()}
        clipped_total = sum(norm**2 for norm in clipped.values()) ** 0.5
        scale = total / clipped_total if clipped_total else 1.0
        norms = {layer: scale * norm for layer, norm in clipped.items()}
        with _file_of(args).open("a") as file:
            file.write(json.dumps({"step": state.global_step, "norms": norms}) + "\n")


def _file_of(arguments: Any) -> Path:
    return Path(arguments.output_dir, FILE)


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter, or its module outside the layers, by its name.

    "base_model.model.bert.encoder.layer.3.output.LayerNorm.houlsby_norm.default.weight" is in
    "bert.encoder.layer.3", "bert.pooler.dense.weight" in "bert.pooler",
    "base_model.model.classifier.modules_to_save.default.weight" in "classifier".
    """
    name = re.sub(r"^(module\.|base_model\.model\.)+", "", parameter)
    layer = re.match(r".*?\.\d+(?=\.)|(.*?\.)?(\w*embeddings|pooler)(?=\.)|[^.]+", name)
    return layer[0] if layer else name
