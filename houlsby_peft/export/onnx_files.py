"""Export adapters together with their base model to ONNX, for services without PyTorch."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import LARGE_INTEGER

from ..errors import AdapterError
from ..method.tuner_layer import HoulsbyTunerLayer
from ..predict.base_model import label_arguments
from ..predict.load import load
from ..predict.predictor import Predictor
from ..predict.readers import cut_arguments
from ..predict.task_bank import TaskBank
from ..saved.record import Place
from .parts import Encoder, LadderWithHead, Tensors, Whole


# The name that optimum and the Hub use.
MODEL_FILE = "model.onnx"
ENCODER_FILE = "encoder.onnx"
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
    adapter: Predictor | TaskBank | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    int8: bool = False,
    tolerance: float = 1e-4,
) -> dict[Path, float]:
    """Export a base model with an adapter, or with the ladders of many tasks, to ONNX, and check
    that onnxruntime computes the same.

    The folder gets `model.onnx`, the configuration with the labels, and the tokenizer, which cuts
    texts to the adapter's length. The number of texts and of tokens stay variable. Everything is
    computed in float32. The model in memory stays as it is.

    Of a bank of ladders, the folder gets `encoder.onnx`, which runs once for all tasks, and for
    each task `TASK.onnx` and `TASK.json`, the configuration with its labels. The inputs of
    `TASK.onnx` are those of the encoder and its outputs.

    Args:
        adapter: What `houlsby_peft.load` returns, an adapter's name on the Hub or its folder, or a
            `TaskBank` whose adapters are ladders.
        folder: The folder to write. Existing files of these names are replaced, once the check has
            passed.
        int8: Also write `model_quantized.onnx`, or `encoder_quantized.onnx`, whose matrix products
            are computed in 8-bit integers.
        tolerance: The largest difference between the outputs of onnxruntime and of PyTorch that is
            accepted, as a share of the largest output above 1, on random inputs of several shapes,
            with padding. It does not apply to the quantized model, which you compare on texts of
            your own.

    Returns:
        Each file of a model, and the largest difference that was found.

    Raises:
        AdapterError: The adapter's task or base model cannot be exported, the tasks of a bank do
            not have one encoder, or the outputs differ by more than `tolerance`. Nothing is written
            then, nor if PyTorch's exporter fails, whose own error is raised.
        ImportError: A package of the extra `export` is missing.
        OSError: The folder cannot be written to, which is found before anything else is done, or
            the disk is full.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        import_module(package)  # before the base model is loaded
    folder = Path(folder)
    is_new = not folder.exists()
    scratch = folder / ".unfinished"
    shutil.rmtree(scratch, ignore_errors=True)  # of an export that was killed
    scratch.mkdir(parents=True)
    try:
        if isinstance(adapter, TaskBank):
            differences = _export_ladders(adapter, scratch, int8, tolerance)
        else:
            predictor = adapter if isinstance(adapter, Predictor) else load(adapter)
            differences = _export_whole(predictor, scratch, int8, tolerance)
        for path in scratch.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(scratch)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
    return {folder / name: difference for name, difference in differences.items()}


def _export_whole(
    predictor: Predictor, folder: Path, int8: bool, tolerance: float
) -> dict[str, float]:
    """Export a model with one adapter; return the differences by file."""
    _check_can_be_exported(predictor)
    model = _copy_with_one_adapter(predictor)
    tokenizer = _copy_tokenizer(predictor, model)
    samples = _make_samples(model, tokenizer)
    expected = _run(Whole(model), samples)
    differences = _export(Whole(model), samples, expected, folder / MODEL_FILE, tolerance)
    if int8:
        differences |= _quantize(folder / MODEL_FILE, samples, expected)
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return differences


def _export_ladders(bank: TaskBank, folder: Path, int8: bool, tolerance: float) -> dict[str, float]:
    """Export the encoder of a bank, and the ladder of each task; return the differences by file."""
    predictors = {}
    for task in bank.tasks:
        reader = bank.reader(task)
        predictors[task] = Predictor(reader.model, reader.name, reader.task, reader.tokenizer)
        _check_can_be_exported(predictors[task])
    place = _find_shared_place(predictors)
    first = next(iter(predictors.values()))
    model = _copy_with_one_adapter(first)
    tokenizer = _copy_tokenizer(first, model)
    tokenizer.save_pretrained(folder)
    samples = _make_samples(model, tokenizer)
    encoder = Encoder(model, place)
    expected = _run(encoder, samples)
    file = folder / ENCODER_FILE
    differences = _export(encoder, samples, expected, file, tolerance)
    if int8:
        differences |= _quantize(file, samples, expected)
    readings = _run_file(file, samples, list(expected[0]))
    inputs = [sample | reading for sample, reading in zip(samples, readings, strict=True)]
    for task, predictor in predictors.items():
        file = folder / f"{task}.onnx"
        labels = folder / f"{task}.json"
        if file.parent != folder:
            raise AdapterError(
                f"The name of a task is that of its files; {task!r} has a folder. Give the task "
                "another name."
            )
        if file.exists() or labels.exists() or task == quantized(Path(ENCODER_FILE)).stem:
            raise AdapterError(
                f"The name of a task is that of its files; {task!r} is already that of the "
                "encoder's or the tokenizer's. Rename its folder."
            )
        model = _copy_with_one_adapter(predictor)
        expected = _run(Whole(model), samples)
        differences |= _export(LadderWithHead(model, place), inputs, expected, file, tolerance)
        model.config.to_json_file(labels)
    return differences


def _find_shared_place(predictors: Mapping[str, Predictor]) -> Place:
    """Return the place of all ladders of an export, which must read the same of a text."""
    places = []
    read: dict[tuple[object, ...], str] = {}
    for task, predictor in predictors.items():
        record = predictor.record
        place = record.ladder
        if place is None:
            raise AdapterError(
                "Adapters are exported together if all are ladders, which leave the encoder as it "
                f"is; that of {task!r} is none. Export each adapter to a folder of its own."
            )
        places.append(place)
        length = cut_arguments(predictor.tokenizer, predictor.model, record).get("max_length")
        base = predictor.base_model.name_or_path
        facts = base, record.beneath_name, place.reads, length
        read.setdefault(facts, task)
    if len(read) > 1:
        raise AdapterError(
            "The ladders of one export must have the same base model, adapter beneath them, layers "
            f"that they read and length of texts; {' and '.join(map(repr, read.values()))} differ. "
            "Export those that agree to a folder of their own."
        )
    return places[0]


def _export(
    part: Whole,
    inputs: Sequence[Tensors],
    expected: Sequence[Tensors],
    path: Path,
    tolerance: float,
) -> dict[str, float]:
    """Write a part of a model; return its file's name and how much its outputs differ."""
    with _quiet():
        _write_model(part, inputs[2], list(expected[0]), path)
    difference = _largest_difference(path, inputs, expected)
    if not difference <= tolerance:
        raise AdapterError(
            f"The outputs of {path.name} must differ from PyTorch's by at most {tolerance:g}; in "
            f"onnxruntime they differ by {difference:.3g}. Update torch, onnxscript and "
            "onnxruntime, or raise tolerance."
        )
    return {path.name: difference}


def _run(part: Whole, inputs: Iterable[Tensors]) -> list[Tensors]:
    """Return the outputs of a part in PyTorch."""
    with torch.inference_mode():
        return [part(tensors) for tensors in inputs]


def _check_can_be_exported(predictor: Predictor) -> None:
    """Refuse what has no equivalent in an ONNX file of one forward pass."""
    reasons = []
    if predictor.task.pipeline not in _TASKS:
        reasons.append(f"its task is {predictor.task.pipeline}")
    if predictor.base_model.config.is_encoder_decoder:
        reasons.append("its base model is an encoder with a decoder")
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
            f"The export is for {', '.join(_TASKS[:-1])} and {_TASKS[-1]}, with an encoder or a "
            f"decoder that reads {', '.join(_INPUTS)} and is in memory, not quantized; of this "
            f"adapter, {' and '.join(reasons)}."
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
    if tokenizer.is_fast:  # for a service without transformers
        backend: Any = tokenizer.backend_tokenizer
        if cut:
            backend.enable_truncation(cut["max_length"])
        if tokenizer.pad_token is not None:
            backend.enable_padding(
                direction=tokenizer.padding_side,
                pad_id=tokenizer.pad_token_id,
                pad_token=tokenizer.pad_token,
            )
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


def _make_samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Tensors]:
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


def _write_model(part: Whole, inputs: Tensors, outputs: list[str], path: Path) -> None:
    program: Any = torch.onnx.export(
        part,
        kwargs={"inputs": inputs},
        input_names=list(inputs),
        output_names=outputs,
        dynamic_shapes={"inputs": {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in inputs}},
        dynamo=True,
        verbose=False,
    )
    for node in program.model.graph:
        node.metadata_props.clear()  # which have the paths of this machine
    size = sum(weight.nbytes for weight in part.parameters())
    program.save(path, external_data=size > _LARGEST_FILE)


def _quantize(
    path: Path, inputs: Sequence[Tensors], expected: Sequence[Tensors]
) -> dict[str, float]:
    """Write a quantized file beside another one; return its name and how much it differs."""
    from .int8 import quantize

    target = quantized(path)
    quantize(path, target)
    return {target.name: _largest_difference(target, inputs, expected)}


def quantized(path: Path) -> Path:
    """Return the path of the quantized file beside another one."""
    return path.with_stem(f"{path.stem}_quantized")


def _run_file(path: Path, inputs: Iterable[Tensors], outputs: list[str]) -> list[Tensors]:
    """Return the outputs of a file in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    computed = []
    for tensors in inputs:
        arrays = {name: value.numpy() for name, value in tensors.items()}
        values = map(torch.from_numpy, session.run(outputs, arrays))
        computed.append(dict(zip(outputs, values, strict=True)))
    return computed


def _largest_difference(
    path: Path, inputs: Sequence[Tensors], expected: Sequence[Tensors]
) -> float:
    """Return the largest difference between the outputs of a file and the expected ones, in tokens
    that are read.
    """
    largest = 0.0
    computed = _run_file(path, inputs, list(expected[0]))
    for tensors, values, outputs in zip(inputs, computed, expected, strict=True):
        mask = tensors["attention_mask"]
        for name, output in outputs.items():
            # Outputs may be large, such as prices of a regression.
            scale = output.nan_to_num(posinf=0, neginf=0).abs().max().clamp(min=1)
            difference = (values[name] - output).abs() / scale
            if output.shape[:2] == mask.shape:
                difference = difference[mask.bool()]
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
