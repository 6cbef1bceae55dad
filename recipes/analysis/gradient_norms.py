"""The norm of the gradient of each layer, step by step, in any run of any recipe.

    accelerate launch recipes/analysis/gradient_norms.py recipes/glue.py --task rte --output_dir runs/rte

runs the recipe (glue.py if none is named) with the callback below, which writes gradient_norms.jsonl into the output
folder. Elsewhere: `trainer.add_callback(GradientNorms())`.
"""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer


FILE = "gradient_norms.jsonl"


class GradientNorms(TrainerCallback):
    """Writes the gradient's norm per layer, pooler and head whenever the Trainer logs, into its output folder.

    One JSON line per logged step: {"step": 50, "norms": {"bert.encoder.layer.0": 0.02, ..., "classifier": 0.3}}. The
    norms are those before clipping. With sharded gradients (FSDP, ZeRO), they are of the main process's shards.
    """

    def __init__(self) -> None:
        self.groups: dict[str, list[nn.Parameter]] = {}
        self.norms: dict[str, torch.Tensor] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Sorts the trained parameters by layer; a new run starts a new file, one that goes on appends to it."""
        self.groups = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.groups.setdefault(layer_of(name), []).append(parameter)
        if state.is_world_process_zero and state.global_step == 0:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            Path(args.output_dir, FILE).write_text("")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the norms, without waiting for the device."""
        self.norms = {
            name: torch.stack(torch._foreach_norm(gradients)).norm()
            for name, parameters in self.groups.items()
            if (gradients := [parameter.grad for parameter in parameters if parameter.grad is not None])
        }

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes them. The Trainer has clipped the gradients, all by one factor, and tells the whole norm before."""
        if not self.norms or "grad_norm" not in (logs or {}) or not state.is_world_process_zero:
            return
        norms = {name: norm.item() for name, norm in self.norms.items()}
        clipped = sum(norm**2 for norm in norms.values()) ** 0.5
        scale = logs["grad_norm"] / clipped if clipped else 1.0
        row = {"step": state.global_step, "norms": {name: scale * norm for name, norm in norms.items()}}
        with Path(args.output_dir, FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")


def layer_of(parameter: str) -> str:
    """Of a parameter's name the part that tells its layer, or its module beside the layers.

    "base_model.model.bert.encoder.layer.3.output.LayerNorm.houlsby_norm.default.weight" is of "bert.encoder.layer.3",
    "bert.pooler.dense.weight" of "bert.pooler", "base_model.model.classifier.modules_to_save.default.weight" of
    "classifier".
    """
    name = re.sub(r"^(module\.|base_model\.model\.)+", "", parameter)
    found = re.match(r".*?\.\d+(?=\.)|(.*?\.)?(\w*embeddings|pooler)(?=\.)|[^.]+", name)
    return found[0] if found else name


def main() -> None:
    """Runs the recipe that the command line names first, or recipes/glue.py, with the callback in it."""
    named = len(sys.argv) > 1 and sys.argv[1].endswith(".py")
    recipe = Path(sys.argv.pop(1) if named else Path(__file__).parents[1] / "glue.py").resolve()
    if not recipe.is_file():
        sys.exit(f"error: there is no recipe {recipe}")
    trainer.DEFAULT_CALLBACKS.append(GradientNorms)
    sys.argv[0] = str(recipe)
    sys.path.insert(0, str(recipe.parent))
    runpy.run_path(str(recipe), run_name="__main__")


if __name__ == "__main__":
    main()
