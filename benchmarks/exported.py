"""Measure predictions of one adapter in onnxruntime and after quantization, relative to PyTorch in
float32.
"""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from transformers import BertTokenizer

from houlsby_peft import Predictor, export_onnx
from houlsby_peft.heads.tasks import TASK_KINDS
from methods import METHODS, OURS
from models import build, frozen, inputs
from timing import compared, interleaved


EAGER = "PyTorch"


def latencies(shape: str, batches: list[int], length: int, rounds: int) -> list[dict[str, Any]]:
    """Measure rows of a length in several batch sizes, on the CPU and as many threads as PyTorch
    has.
    """
    base, model = (build(shape, method).eval() for method in (frozen, METHODS[OURS]))
    vocabulary = {
        word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    }
    predictor = Predictor(
        model, "default", TASK_KINDS[0], BertTokenizer(vocab=vocabulary, model_max_length=512)
    )
    models = {"PyTorch, base model alone": base, EAGER: model}
    models["PyTorch, int8 (torch.ao)"] = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    models["PyTorch, int8 (torchao)"] = copy.deepcopy(model)
    quantize_(models["PyTorch, int8 (torchao)"], Int8DynamicActivationInt8WeightConfig())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Waiting threads would count as processor time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory() as folder:
        files = export_onnx(predictor, folder, int8=True)
        sizes = {path.name: path.stat().st_size for path in files}
        sessions = {
            path.name: onnxruntime.InferenceSession(path, options) for path in map(Path, files)
        }
    rows = []
    for batch in batches:
        ids = inputs(batch, length)["input_ids"]
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids),
        }
        arrays = {name: value.numpy() for name, value in given.items()}
        calls = {name: partial(_run_eager, each, given) for name, each in models.items()}
        calls |= {
            f"onnxruntime, {name}": partial(each.run, None, arrays)
            for name, each in sessions.items()
        }
        for name, numbers in compared(interleaved(calls, rounds), EAGER).items():
            file_bytes = sizes.get(name.partition(", ")[2])
            rows.append(
                {
                    "cell": f"{shape}:{batch}:{length}",
                    "method": name,
                    "file_bytes": file_bytes,
                    **numbers,
                }
            )
    return rows


def _run_eager(model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        model(**given)
