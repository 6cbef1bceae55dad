"""Export an adapter together with its base model to ONNX, for services without PyTorch."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from .errors import AdapterError
from .method.tuner_layer import HoulsbyTunerLayer
from .predict.base_model import label_arguments
from .predict.load import load
from .predict.predictor import Predictor
from .predict.questions import cut_arguments


# The names that optimum and the Hub use.
MODEL_FILE = "model.onnx"
INT8_FILE = "model_quantized.onnx"
_TASKS = (
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
    "feature-extraction",
)
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Rows and tokens of the inputs on which both runtimes are compared, as far as the model reads so
# many tokens.
_COMPARED = ((1, 1), (1, 11), (2, 6), (5, 128), (3, 512))
# protobuf cannot hold more in one file.
_LARGEST_FILE = 2**31 - 2**24


def export_onnx(
    adapter: Predictor | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    int8: bool = False,
    tolerance: float = 1e-4,
) -> dict[Path, float]:
    """Export a base model with one adapter to ONNX, and check that onnxruntime computes the same.

    The folder gets `model.onnx`, the configuration with the labels, and the tokenizer, which cuts
    texts to the adapter's length. The number of texts and of tokens stay variable. Everything is
    computed in float32. The model in memory stays as it is.

    Args:
        adapter: What `houlsby_peft.load` returns, or an adapter's name on the Hub or its folder.
        folder: The folder to write. Existing files of these names are replaced, once the check has
            passed.
        int8: Also write `model_quantized.onnx`, whose matrix products are computed in 8-bit
            integers.
        tolerance: The largest difference between the outputs of onnxruntime and of PyTorch that is
            accepted, as a share of the largest output above 1, on random inputs of several shapes,
            with padding. It does not apply to the quantized model, which you compare on texts of
            your own.

    Returns:
        Each file of a model, and the largest difference that was found.

    Raises:
        AdapterError: The adapter's task or base model cannot be exported, or the outputs differ by
            more than `tolerance`. Nothing is written then, nor if PyTorch's exporter fails, whose
            own error is raised.
        ImportError: A package of the extra `export` is missing.
        OSError: The folder cannot be written to, which is found before anything else is done, or
            the disk is full.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_module(package)  # before the base model is loaded
    folder = Path(folder)
    scratch = folder / ".unfinished"
    shutil.rmtree(scratch, ignore_errors=True)  # of an export that was killed
    scratch.mkdir(parents=True)
    try:
        predictor = adapter if isinstance(adapter, Predictor) else load(adapter)
        _check_can_be_exported(predictor)
        model = _copy_with_one_adapter(predictor)
        tokenizer = _copy_tokenizer(predictor, model)
        samples = _make_samples(model, tokenizer)
        with torch.inference_mode():
            expected = [dict(model(**sample)) for sample in samples]
        file = scratch / MODEL_FILE
        with _quiet():
            _write_model(model, samples[2], list(expected[0]), file)
        differences = {MODEL_FILE: _largest_difference(file, samples, expected)}
        if not differences[MODEL_FILE] <= tolerance:
            raise AdapterError(
                f"The outputs of the exported model must differ from PyTorch's by at most "
                f"{tolerance:g}; in onnxruntime they differ by {differences[MODEL_FILE]:.3g}. "
                "Update torch, onnxscript and onnxruntime, or raise tolerance."
            )
        if int8:
            int8_file = scratch / INT8_FILE
            _quantize(file, int8_file)
            differences[INT8_FILE] = _largest_difference(int8_file, samples, expected)
        model.config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        for path in scratch.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(scratch)
    return {folder / name: difference for name, difference in differences.items()}


def _check_can_be_exported(predictor: Predictor) -> None:
    """Refuse what has no equivalent in an ONNX file of one forward pass."""
    reasons = []
    if predictor.task.pipeline not in _TASKS:
        reasons.append(f"its task is {predictor.task.pipeline}")
    arguments = set(inspect.signature(predictor.base_model.forward).parameters)
    inputs = arguments.intersection(predictor.tokenizer.model_input_names)
    if not_exported := sorted(inputs.difference(_INPUTS)):
        reasons.append(f"its base model also reads {', '.join(not_exported)}")
    for name, weight in predictor.model.named_parameters():
        # Converted to float32, these would be other numbers.
        if weight.is_meta or not weight.is_floating_point():
            reasons.append(f"{name} is quantized or offloaded")
            break
    if reasons:
        raise AdapterError(
            f"The export is for {', '.join(_TASKS[:-1])} and {_TASKS[-1]}, with models that read "
            f"{', '.join(_INPUTS)} and are in memory, not quantized; of this adapter, "
            f"{' and '.join(reasons)}. Serve it with houlsby_peft.load, or load the base model "
            "without device_map and quantization."
        )


def _copy_tokenizer(predictor: Predictor, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer that gives what the model reads, as long as in training."""
    tokenizer = copy.deepcopy(predictor.tokenizer)
    arguments = inspect.signature(model.forward).parameters
    names = [name for name in tokenizer.model_input_names if name in arguments]
    tokenizer.model_input_names = names
    tokenizer.init_kwargs["model_input_names"] = names  # otherwise not saved
    cut = cut_arguments(tokenizer, model, predictor.record)
    tokenizer.model_max_length = cut.get("max_length", tokenizer.model_max_length)
    return tokenizer


def _copy_with_one_adapter(predictor: Predictor) -> PreTrainedModel:
    """Return a copy of the base model with this adapter alone, in float32 on the CPU, in evaluation
    mode.

    It shares the weights that are so already, but no modules: others may be using the model, with
    other adapters.
    """
    model = predictor.model
    copies: dict[int, Any] = {}
    for weight in model.parameters():
        in_float32 = weight.detach().to("cpu", torch.float32)
        copies[id(weight)] = nn.Parameter(in_float32, requires_grad=False)
    for module in model.modules():
        if isinstance(module, HoulsbyTunerLayer):
            copies[
                id(module.state.batches)
            ] = {}  # the mixed batches that other threads are running
    copied = copy.deepcopy(model, copies).cpu().eval()
    copied.set_adapter(predictor.name, inference_mode=True)
    for name in set(copied.peft_config) - {predictor.name}:
        copied.delete_adapter(name)
    base: PreTrainedModel = copied.get_base_model()  # type: ignore[assignment]
    # What a service needs to know of the adapter.
    config, record = base.config, predictor.record
    config.update(label_arguments(record))
    config.dtype = torch.float32
    config.architectures = [type(base).__name__]
    # The tuples of these options would be outputs.
    for option in ("use_cache", "output_attentions", "output_hidden_states"):
        if getattr(config, option, False):
            setattr(config, option, False)
    for name in ("null_threshold", "thresholds"):
        if getattr(record, name) is not None:
            setattr(config, name, getattr(record, name))
    return base


def _make_samples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, torch.Tensor]]:
    """Return random inputs of several shapes, `(rows, tokens)` each.

    If there is a padding token, the rows of an input have different lengths.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    padding = tokenizer.pad_token_id
    positions = getattr(config, "max_position_embeddings", None) or LARGE_INTEGER
    longest = int(min(tokenizer.model_max_length, positions))
    # Without padding, which models take for the end of a text wherever it is.
    words = torch.tensor(sorted(set(range(config.vocab_size)) - set(tokenizer.all_special_ids)))
    samples = []
    for rows, tokens in _COMPARED:
        tokens = min(tokens, longest)
        shortest = tokens if padding is None else (tokens + 1) // 2
        lengths = torch.linspace(tokens, shortest, rows).long()
        mask = (torch.arange(tokens) < lengths[:, None]).long()
        ids = words[torch.randint(0, len(words), (rows, tokens), generator=generator)]
        number_of_types = getattr(config, "type_vocab_size", 0) or 1
        types = torch.randint(0, number_of_types, (rows, tokens), generator=generator)
        values = (ids.where(mask.bool(), padding or 0), mask, types * mask)
        inputs = dict(zip(_INPUTS, values, strict=True))
        sample = {name: inputs[name] for name in tokenizer.model_input_names}
        if tokenizer.padding_side == "left":
            sample = {name: value.flip(1) for name, value in sample.items()}
        samples.append(sample)
    return samples


def _write_model(
    model: PreTrainedModel, sample: Mapping[str, torch.Tensor], outputs: list[str], path: Path
) -> None:
    program: Any = torch.onnx.export(
        model,
        kwargs=dict(sample),
        input_names=list(sample),
        output_names=outputs,
        dynamic_shapes={name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in sample},
        dynamo=True,
        verbose=False,
    )
    size = sum(weight.nbytes for weight in model.parameters())
    program.save(path, external_data=size > _LARGEST_FILE)


def _quantize(source: Path, target: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    # The recorded shapes of weights, which the quantizer transposes and then finds to be wrong.
    del model.graph.value_info[:]
    with _quiet():
        is_large = source.with_name(f"{MODEL_FILE}.data").exists()
        quantize_dynamic(
            model,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=is_large,
        )


def _largest_difference(
    path: Path, samples: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]
) -> float:
    """Return the largest difference between the outputs of a file and the expected ones, in tokens
    that are read.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    largest = 0.0
    for sample, outputs in zip(samples, expected, strict=True):
        arrays = {name: value.numpy() for name, value in sample.items()}
        computed = session.run(list(outputs), arrays)
        for value, output in zip(computed, outputs.values(), strict=True):
            # Outputs may be large, such as prices of a regression.
            scale = output.nan_to_num(posinf=0, neginf=0).abs().max().clamp(min=1)
            difference = (torch.from_numpy(value) - output).abs() / scale
            if output.shape[:2] == sample["attention_mask"].shape:
                difference = difference[sample["attention_mask"].bool()]
            largest = max(largest, float(difference.nan_to_num(nan=torch.inf).max()))
    return largest


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporters' messages about their own internals, and about steps that the export takes
    itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
