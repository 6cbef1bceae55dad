"""What lies below the first adapter, computed once for each text."""

import os
from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from common.errors import RecipeError
from houlsby_peft.frozen_prefix import FrozenPrefix


IN_MEMORY = "memory"


def keep_prefix(model: PeftModel, where: str, gigabytes: float, training: TrainingArguments) -> None:
    """Keeps what the layers below the first adapter compute, from the first epoch on, in place of running them again.

    Args:
        model: With adapters in upper layers alone; changed in place.
        where: "memory", or a folder, which several runs may use, also at the same time.
        gigabytes: How much to keep at most, in this process.
        training: Of the run.

    Raises:
        RecipeError: If nothing is below the first adapter, or the model is sharded.
    """
    # Asked for by a flag or by accelerate; transformers' own is_fsdp_enabled tells about loading alone.
    fsdp = training.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if is_deepspeed_zero3_enabled() or fsdp:
        raise RecipeError("--keep_prefix needs whole layers in each process; ZeRO-3 and FSDP shard them. Use DDP.")
    folder = None if where == IN_MEMORY else Path(where)
    try:
        prefix = FrozenPrefix(model, max_bytes=int(gigabytes * 1e9), folder=folder)
    except ValueError as error:
        raise RecipeError(f"--keep_prefix: {error} The flag is --layers.") from error
    if PartialState().is_main_process:
        below = "the layer below it" if prefix.index == 1 else f"the {prefix.index} layers below it"
        print(f"kept in {where}: what the embeddings and {below} give the first adapter, without dropout")
