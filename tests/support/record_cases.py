"""The cases of `record.py`: tiny models with random weights, and what is recorded of their adapters.

The cases use public names only and find nothing out by file or class names of the library, so that they run unchanged
on every version.
"""

from __future__ import annotations

import importlib
import itertools
import json
import zlib
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from peft import (
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import houlsby_peft
from architecture_rows import INPUTS, ROWS, build
from home_made import HomeMade
from houlsby_peft import HoulsbyConfig, TaskBank, ablate, load, prune
from hub_models import LABELS, TEXTS, make_base


if TYPE_CHECKING:
    from record import Case, Record


ROWS_PER_BATCH = 5
WORDS = [text for text, _ in TEXTS]
EVERY_POSITION = ("attention", "feed_forward", "cross_attention")
# Four layers, so that three that share a bottleneck are followed by one that does not belong to them.
DEEP = {"num_hidden_layers": 4}
DEEP_BOTH = {"encoder_layers": 4, "decoder_layers": 4}
# The name: the row of `architecture_rows.py` that makes the model tiny, the class, and changes of the configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertForSequenceClassification", DEEP),
    "roberta": ("roberta", "RobertaForSequenceClassification", DEEP),
    "deberta-v2": ("deberta-v2:v3", "DebertaV2ForSequenceClassification", DEEP),
    "distilbert": ("distilbert", "DistilBertForSequenceClassification", {"n_layers": 4}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_layer": 4}),
    "gpt2-classifier": ("gpt2", "GPT2ForSequenceClassification", {"n_layer": 4}),
    "llama": ("llama", "LlamaForCausalLM", DEEP),
    "llama-classifier": ("llama", "LlamaForSequenceClassification", DEEP),
    "t5": ("t5", "T5ForConditionalGeneration", {"num_layers": 4, "decoder_start_token_id": 0}),
    "bart": ("bart", "BartForConditionalGeneration", DEEP_BOTH),
    "bart-classifier": ("bart", "BartForSequenceClassification", DEEP_BOTH),
    "vit": ("vit", "ViTForImageClassification", DEEP),
    "whisper": ("whisper", "WhisperForConditionalGeneration", DEEP_BOTH),
    "clip": (
        "clip",
        "CLIPModel",
        {key: {**ROWS["clip"].config[key], **DEEP} for key in ("text_config", "vision_config")},
    ),
    "modernbert": ("modernbert", "ModernBertForSequenceClassification", DEEP),
    # Not in the table of architectures.
    "stablelm": ("llama", "StableLmForCausalLM", DEEP),
}
TASK_TYPES = {"gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bart": "SEQ_2_SEQ_LM", "gpt2-classifier": "SEQ_CLS"}


def _public(name: str, module: str) -> Any:
    """Return what is public today; version 0.1 documents it in a module of its own."""
    home = houlsby_peft if hasattr(houlsby_peft, name) else importlib.import_module(f"houlsby_peft.{module}")
    return getattr(home, name)


def base_of(name: str, **changes: Any) -> nn.Module:
    """Build a tiny base model, always with the same weights."""
    if name == "home-made":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return HomeMade().eval()
    row, class_name, own = MODELS[name]
    model_class = getattr(transformers, class_name)
    labels = {"num_labels": 3} if "Classification" in class_name else {}
    return build(model_class, model_class.config_class(**{**ROWS[row].config, **own, **labels, **changes}))


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """Return a batch for a base model, always the same."""
    generator = torch.Generator().manual_seed(0)
    if name == "home-made":
        return {"ids": INPUTS["text"](ROWS_PER_BATCH, generator)["input_ids"]}
    kind = "text" if name == "bart-classifier" else ROWS[MODELS[name][0]].inputs
    inputs = INPUTS[kind](ROWS_PER_BATCH, generator)
    if name == "bart-classifier":
        inputs["input_ids"][:, -1] = 2  # whose hidden state is classified
    return inputs


def outputs(model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Return all floating tensors that a model computes."""
    result = model(**inputs, **options)
    named = {"output": result} if isinstance(result, torch.Tensor) else result
    return {
        key: value for key, value in named.items() if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def eval_outputs(model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Return the same in eval mode and without gradients."""
    model.eval()
    with torch.no_grad():
        return outputs(model, inputs, **options)


def noise(name: str, like: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Return random numbers that depend on nothing but a name, a seed and a shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(like.shape, generator=generator)


def loss(results: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a scalar to which each output contributes with weights of its own."""
    return torch.stack([(value.float() * noise(key, value)).mean() for key, value in results.items()]).sum()


def saved_weights(model: PeftModel, adapter_name: str) -> dict[str, torch.Tensor]:
    """Return what an adapter's file would hold."""
    return get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)


def perturb(model: PeftModel, adapter_name: str, seed: int = 1) -> None:
    """Move an adapter's weights as far as training would. Those of bottlenecks no longer depend on their start."""
    weights = {
        key: 0.2 * noise(key, weight, seed) + (0 if "houlsby_adapter" in key else weight)
        for key, weight in saved_weights(model, adapter_name).items()
    }
    set_peft_model_state_dict(model, weights, adapter_name=adapter_name)


def adapted(name: str, options: Mapping[str, Any] | None = None, adapter_name: str = "first", **changes: Any) -> Any:
    """Build a base model with a perturbed adapter, in eval mode."""
    model = get_peft_model(base_of(name, **changes), config_of(name, options), adapter_name=adapter_name).eval()
    perturb(model, adapter_name)
    return model


def config_of(name: str, options: Mapping[str, Any] | None = None) -> HoulsbyConfig:
    return HoulsbyConfig(**{"r": 4, "task_type": TASK_TYPES.get(name), **(options or {})})


def add(model: PeftModel, name: str, adapter_name: str, options: Mapping[str, Any], seed: int) -> None:
    """Add a perturbed adapter to a model that has one."""
    model.add_adapter(adapter_name, config_of(name, options))
    perturb(model, adapter_name, seed)


def gradients(model: nn.Module, inputs: Mapping[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    """Return the outputs in train mode, with dropout from a fixed seed, and the gradients of their `loss` by name."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    results = outputs(model, inputs, **options)
    loss(results).backward()
    model.eval()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {**{f"output {key}": value for key, value in results.items()}, **found}


def trained_names(model: nn.Module) -> list[str]:
    return sorted(name for name, weight in model.named_parameters() if weight.requires_grad)


def put_file(record: Record, folder: Path) -> None:
    """Record what an adapter's folder holds, and the fields of the configuration that the user has set."""
    record.put("weights", load_file(folder / "adapter_model.safetensors"))
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    fields = ("peft_type", "r", "share_layers", "train_layer_norm", "positions", "target_modules")
    record.put("config", {field: config.get(field) for field in fields})


def everything(name: str, options: Mapping[str, Any], record: Record, folder: Path, **changes: Any) -> None:
    """Record the life of one adapter: fresh, trained, disabled, saved, loaded under another name, unloaded."""
    inputs = inputs_of(name)
    base = base_of(name, **changes)
    state = list(base.state_dict())
    record.put("base", eval_outputs(base, inputs))
    torch.manual_seed(0)
    model = get_peft_model(base, config_of(name, options), adapter_name="first")
    record.put("trained parameters", trained_names(model))
    record.put("trained numbers", sum(weight.numel() for weight in model.parameters() if weight.requires_grad))
    record.put("fresh", eval_outputs(model, inputs))
    perturb(model, "first")
    record.put("perturbed", eval_outputs(model, inputs))
    record.put("train", gradients(model, inputs))
    with model.disable_adapter():
        record.put("disabled", eval_outputs(model, inputs))
    model.save_pretrained(folder)
    put_file(record.part("file"), folder / "first")
    loaded = PeftModel.from_pretrained(base_of(name, **changes), folder / "first", adapter_name="second")
    record.put("loaded", eval_outputs(loaded, inputs))
    unloaded = model.unload()
    record.put("unloaded", eval_outputs(unloaded, inputs))
    record.put("unloaded has the base model's state", list(unloaded.state_dict()) == state)


# Adapters that differ in everything that may differ within a batch.
UNLIKE = {
    "first": {},
    "second": {"r": 2, "share_layers": 1, "train_layer_norm": False},
    "third": {"r": 3, "share_layers": 3, "train_layer_norm": "all", "activation": "relu"},
}


def three_adapters(name: str, **changes: Any) -> PeftModel:
    model = adapted(name, **changes)
    for seed, adapter_name in ((2, "second"), (3, "third")):
        add(model, name, adapter_name, UNLIKE[adapter_name], seed)
    return model


def mixed(name: str, record: Record, folder: Path) -> None:
    model, inputs = three_adapters(name), inputs_of(name)
    add(model, name, "like first", {}, seed=5)  # so that the two can be computed together
    orders = {
        "sorted": ["__base__", "first", "first", "second", "third"],
        "unsorted": ["third", "first", "__base__", "second", "first"],
        "alike, sorted": ["first", "first", "like first", "like first", "like first"],
        "alike, unsorted": ["like first", "first", "__base__", "first", "like first"],
        "one adapter": ["second"] * ROWS_PER_BATCH,
        "base only": ["__base__"] * ROWS_PER_BATCH,
    }
    for label, names in orders.items():
        record.put(label, eval_outputs(model, inputs, adapter_names=names))
    record.put("plain after mixed", eval_outputs(model, inputs))
    with model.disable_adapter():
        record.put("disabled", eval_outputs(model, inputs, adapter_names=orders["unsorted"]))
    perturb(model, "first", seed=4)
    record.put("after a change", eval_outputs(model, inputs, adapter_names=orders["unsorted"]))
    model.delete_adapter("second")
    names = ["third", "first", "__base__", "first", "third"]
    record.put("after a deletion", eval_outputs(model, inputs, adapter_names=names))
    if name in ("gpt2", "t5"):
        inputs.pop("decoder_input_ids", None)
        for label, search in {"greedy": {}, "beams": {"num_beams": 2, "num_return_sequences": 2}}.items():
            settings = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, **search}
            record.put(f"generated, {label}", model.generate(**inputs, adapter_names=names, **settings))
            record.put(f"generated by one adapter, {label}", model.generate(**inputs, **settings))


def stacks(name: str, record: Record, folder: Path) -> None:
    model, inputs = three_adapters(name), inputs_of(name)
    for names in (["first", "second"], ["second", "first"], ["third", "first", "second"]):
        label = ", ".join(names)
        model.base_model.set_adapter(names)
        record.put(label, eval_outputs(model, inputs))
        record.put(f"{label}, train", gradients(model, inputs))
        record.put(f"{label}, trained parameters", trained_names(model))
    model.set_adapter("second")
    record.put("second alone", eval_outputs(model, inputs))


def averages(name: str, record: Record, folder: Path) -> None:
    for label, options in {"own": {}, "shared": {"share_layers": 3, "train_layer_norm": "all"}}.items():
        model, inputs = adapted(name, options), inputs_of(name)
        add(model, name, "second", options, seed=2)
        model.base_model.add_weighted_adapter(["first", "second"], [0.3, 0.9], "mean")
        model.set_adapter("mean")
        record.put(f"{label}/output", eval_outputs(model, inputs))
        model.save_pretrained(folder / label, selected_adapters=["mean"])
        put_file(record.part(f"{label}/file"), folder / label / "mean")


def ablation(name: str, record: Record, folder: Path) -> None:
    for share in (0, 3):
        model, inputs = adapted(name, {"share_layers": share}), inputs_of(name)
        for keep_norms in (True, False):
            part = record.part(f"share {share}, norms {keep_norms}")
            with ablate(model, layers=[0, 2], keep_norms=keep_norms):
                part.put("ablated", eval_outputs(model, inputs))
            part.put("after", eval_outputs(model, inputs))
            pruned = f"pruned_{keep_norms}"
            prune(model, layers=[0, 2], adapter_name=pruned, source="first", keep_norms=keep_norms)
            model.set_adapter(pruned)
            part.put("pruned", eval_outputs(model, inputs))
            model.save_pretrained(folder / str(share), selected_adapters=[pruned])
            put_file(part.part("file"), folder / str(share) / pruned)
            model.set_adapter("first")


def deletion(name: str, record: Record, folder: Path) -> None:
    options = {"share_layers": 3}
    model, inputs = adapted(name, options), inputs_of(name)
    add(model, name, "second", {"share_layers": 1}, seed=2)
    model.delete_adapter("first")
    record.put("active", model.active_adapters)
    record.put("other", eval_outputs(model, inputs))
    add(model, name, "first", options, seed=3)
    model.set_adapter("first")
    record.put("added again", eval_outputs(model, inputs))


def ways_to_load(name: str, record: Record, folder: Path) -> None:
    """Record what each way to add, load and name an adapter gives, but for the ones that `everything` takes."""
    inputs = inputs_of(name)
    base_of(name).save_pretrained(folder / "base")
    options = {"share_layers": 3, "train_layer_norm": "all"}
    model = get_peft_model(base_of(name), config_of(name, options), adapter_name="first")
    perturb(model, "first")
    weights = saved_weights(model, "first")
    model.save_pretrained(folder)
    path = str(folder / "first")
    on_meta = PeftModel.from_pretrained(base_of(name), path, adapter_name="other", low_cpu_mem_usage=True)
    record.put("low_cpu_mem_usage", eval_outputs(on_meta, inputs))
    trainable = PeftModel.from_pretrained(base_of(name), path, adapter_name="other", is_trainable=True)
    record.put("is_trainable", trained_names(trainable))
    trainable.load_adapter(path, "beside")
    trainable.set_adapter("beside")
    record.put("beside", eval_outputs(trainable, inputs))
    other = get_peft_model(base_of(name), config_of(name, options), adapter_name="other")
    set_peft_model_state_dict(other, weights, adapter_name="other")
    record.put("set_peft_model_state_dict", eval_outputs(other, inputs))
    injected = inject_adapter_in_model(config_of(name, options), base_of(name), adapter_name="other")
    without_prefix = {key.removeprefix("base_model.model."): weight for key, weight in weights.items()}
    set_peft_model_state_dict(injected, without_prefix, adapter_name="other")
    record.put("inject_adapter_in_model", eval_outputs(injected, inputs))
    record.put("injected state", sorted(injected.state_dict()))
    automatic = type(base_of(name)).from_pretrained(folder / "base")
    automatic.load_adapter(path, adapter_name="other")
    record.put("transformers", eval_outputs(automatic, inputs))
    automatic.disable_adapters()
    record.put("transformers, disabled", eval_outputs(automatic, inputs))
    automatic.enable_adapters()
    record.put("transformers, enabled again", eval_outputs(automatic, inputs))


def two_layer_head(record: Record, folder: Path) -> None:
    put_two_layer_head = _public("put_two_layer_head", "two_layer_head")
    base, tokenizer = _saved_base(folder)
    inputs = dict(tokenizer(WORDS, padding=True, return_tensors="pt"))
    model = _classifier(base)
    put_two_layer_head(model)
    record.put("base", eval_outputs(model, inputs))
    config = HoulsbyConfig(task_type="SEQ_CLS", r=4, id2label=dict(enumerate(LABELS)), two_layer_head=True)
    model = get_peft_model(model, config, adapter_name="first")
    record.put("trained parameters", trained_names(model))
    perturb(model, "first")
    record.put("perturbed", eval_outputs(model, inputs))
    record.put("train", gradients(model, inputs))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder / "first")
    put_file(record.part("file"), folder / "first")
    predictor = load(folder / "first")
    record.put("loaded", eval_outputs(predictor.model, inputs))
    record.put("predicted", predictor.predict(WORDS))


def resumed(name: str, options: Mapping[str, Any], record: Record, folder: Path) -> None:
    """Record six steps of training, and three with three more after saving and loading."""
    inputs = inputs_of(name)

    def train(model: PeftModel, steps: range, state: dict[str, Any] | None = None) -> dict[str, Any]:
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.01)
        if state is not None:
            optimizer.load_state_dict(state)
        model.train()
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss(outputs(model, inputs)).backward()
            optimizer.step()
        model.eval()
        return optimizer.state_dict()

    def fresh() -> PeftModel:
        torch.manual_seed(0)
        return get_peft_model(base_of(name), config_of(name, options), adapter_name="first")

    model = fresh()
    train(model, range(6))
    at_once = {key: weight.clone() for key, weight in saved_weights(model, "first").items()}
    record.put("six steps", at_once)
    record.put("output", eval_outputs(model, inputs))
    model = fresh()
    state = train(model, range(3))
    model.save_pretrained(folder)
    model = PeftModel.from_pretrained(base_of(name), folder / "first", adapter_name="first", is_trainable=True)
    train(model, range(3, 6), state)
    again = saved_weights(model, "first")
    record.put("three and three steps", again)
    equal = again.keys() == at_once.keys() and all(torch.equal(weight, again[key]) for key, weight in at_once.items())
    record.put("the same weights", equal)


def half_precision(name: str, autocast: bool, record: Record, folder: Path) -> None:
    inputs = inputs_of(name)
    base = base_of(name).to(torch.bfloat16)
    model = get_peft_model(base, config_of(name), adapter_name="first", autocast_adapter_dtype=autocast)
    perturb(model, "first")
    model.add_adapter("second", config_of(name, UNLIKE["second"]), autocast_adapter_dtype=autocast)
    record.put("perturbed", eval_outputs(model, inputs))
    names = ["second", "first", "__base__", "second", "first"]
    record.put("mixed", eval_outputs(model, inputs, adapter_names=names))
    record.put("train", gradients(model, inputs))
    model.save_pretrained(folder)
    put_file(record.part("file"), folder / "first")


def quantized(package: str, record: Record, folder: Path) -> None:
    if package == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        settings = transformers.TorchAoConfig(Int8WeightOnlyConfig())
    else:
        settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    wide = {"hidden_size": 64, "intermediate_size": 128}
    base_of("llama", **wide).save_pretrained(folder / "base")
    inputs = inputs_of("llama")

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder / "base", quantization_config=settings, device_map={"": "cpu"}
        )

    model = get_peft_model(base(), config_of("llama"), adapter_name="first")
    perturb(model, "first")
    record.put("train", gradients(model, inputs))
    record.put("perturbed", eval_outputs(model, inputs))
    names = ["first", "__base__", "first", "first", "__base__"]
    record.put("mixed", eval_outputs(model, inputs, adapter_names=names))
    with model.disable_adapter():
        record.put("disabled", eval_outputs(model, inputs))
    model.save_pretrained(folder)
    put_file(record.part("file"), folder / "first")
    loaded = PeftModel.from_pretrained(base(), folder / "first", adapter_name="second")
    record.put("loaded", eval_outputs(loaded, inputs))


def frozen_prefix(name: str, record: Record, folder: Path) -> None:
    prefix_class = _public("FrozenPrefix", "frozen_prefix")
    inputs = inputs_of(name)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 4:] = 0
    for label, options in {"own": {}, "shared": {"share_layers": 2, "train_layer_norm": False}}.items():
        for place in (None, folder):
            part = record.part(f"{label}, {'in memory' if place is None else 'in a folder'}")
            no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if name == "bert" else {}
            model = adapted(name, {"layers_to_transform": [2, 3], **options}, **no_dropout)
            part.put("without", gradients(model, inputs))
            prefix = prefix_class(model, folder=place)
            part.put("first epoch", gradients(model, inputs))
            part.put("second epoch", gradients(model, inputs))
            part.put("evaluated", eval_outputs(model, inputs))
            prefix.remove()
            part.put("removed", eval_outputs(model, inputs))


def _saved_base(folder: Path) -> tuple[Path, Any]:
    base = make_base(folder / "base")
    return base, AutoTokenizer.from_pretrained(base)


def _classifier(base: Path, auto_class: Any = AutoModelForSequenceClassification, **options: Any) -> nn.Module:
    torch.manual_seed(0)  # the head's first weights
    return auto_class.from_pretrained(base, **({"num_labels": 3} | options))


def _save_adapter(folder: Path, model: nn.Module, seed: int, **options: Any) -> Path:
    adapted_model = get_peft_model(model, HoulsbyConfig(**{"r": 4, **options}))
    perturb(adapted_model, "default", seed)
    adapted_model.save_pretrained(folder)
    return folder


def predictions(record: Record, folder: Path) -> None:
    base, _ = _saved_base(folder)
    names = dict(enumerate(LABELS))
    classifier = _save_adapter(folder / "classes", _classifier(base, id2label=names), 1, task_type="SEQ_CLS")
    predictor = load(classifier)
    record.put("labels", predictor.labels)
    record.put("classes", predictor.predict([*WORDS, (WORDS[0], WORDS[1]), WORDS[1] * 30], batch_size=5))
    regression = _save_adapter(folder / "regression", _classifier(base, num_labels=1), 2)
    beside = load(regression, beside=predictor)
    record.put("regression beside", beside.predict(WORDS))
    record.put("classes again", predictor.predict(WORDS))
    record.put("regression alone", load(regression).predict(WORDS))
    options = {"share_layers": 1, "train_layer_norm": "all"}
    tags = _classifier(base, AutoModelForTokenClassification, id2label={0: "O", 1: "B-PER", 2: "I-PER"})
    record.put("tokens", load(_save_adapter(folder / "tags", tags, 3, **options)).predict(WORDS))
    answers = AutoModelForQuestionAnswering.from_pretrained(base)
    reader = load(_save_adapter(folder / "answers", answers, 4, task_type="QUESTION_ANS"))
    record.put("answers", reader.predict([(WORDS[8], " ".join(WORDS))] * 2))


def task_bank(record: Record, folder: Path) -> None:
    base, _ = _saved_base(folder)
    heads = {
        "sentiment": ({"id2label": {0: "bad", 1: "good"}}, {}),
        "topic": ({"id2label": dict(enumerate("abcde"))}, {"share_layers": 1, "r": 2}),
        "similarity": ({"id2label": {0: "similarity"}}, {"share_layers": 3}),
        "tags": (
            {"id2label": dict(enumerate("xyz")), "problem_type": "multi_label_classification"},
            {"train_layer_norm": False, "layers_to_transform": [1]},
        ),
    }
    folders = {}
    for seed, (task, (head, options)) in enumerate(heads.items()):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(base, **head)
        folders[task] = _save_adapter(folder / task, model, seed, task_type="SEQ_CLS", **options)
    bank = TaskBank(folders)
    tasks = list(heads)
    requests = [(tasks[(index * 7 + index // 3) % 4], text) for index, text in enumerate(WORDS * 2)]
    record.put("tasks", bank.tasks)
    record.put("at once", bank.predict(requests, batch_size=32))
    record.put("in batches", bank.predict(requests[::-1], batch_size=5))
    record.put("held", sorted(bank.held))


SHARED = (0, 1, 3)
NORMS = (True, False, "all")
BERT_OPTIONS: dict[str, dict[str, Any]] = {
    "positions": {"positions": ("attention",)},
    "target_modules, list": {"target_modules": ["intermediate.dense"]},
    "target_modules, regex": {"target_modules": r".*layer\.[13]\.attention\.output\.dense", "share_layers": 2},
    "layers_to_transform": {"layers_to_transform": [1, 2], "share_layers": 2},
    "one layer": {"layers_to_transform": 1, "layers_pattern": "layer"},
    "rank_pattern": {"rank_pattern": {"attention.output.dropout": 2, r"layer\.3\.output\.dropout": 6}},
    "exclude_modules": {"exclude_modules": ["layer.1.output.dropout", "layer.2.attention.output.dropout"]},
    "modules_to_save": {"modules_to_save": ["pooler"]},
    "no head": {"modules_to_save": []},
    "init_std": {"init_std": 0.0},
    "init_weights": {"init_weights": False},
    "activation": {"activation": "prelu"},
    "dropout": {"dropout": 0.3, "share_layers": 1},
    "trainable_token_indices": {"trainable_token_indices": [3, 7]},
    "task_type": {"task_type": "SEQ_CLS", "share_layers": 1},
    "id2label": {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "problem_type": "single_label_classification"},
}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "bert": BERT_OPTIONS,
    "gpt2": {
        "positions": {"positions": ("feed_forward",)},
        "target_modules, list": {"target_modules": ["mlp.c_fc"], "share_layers": 2},
        "target_modules, regex": {"target_modules": r".*h\.[02]\.attn\.c_proj"},
        "layers_to_transform": {"layers_to_transform": [0, 3]},
        "rank_pattern": {"rank_pattern": {"mlp.dropout": 2}},
        "exclude_modules": {"exclude_modules": r".*h\.0\..*"},
        "modules_to_save": {"modules_to_save": ["ln_f"], "train_layer_norm": False},
        "init_std": {"init_std": 0.0},
        "trainable_token_indices": {"trainable_token_indices": {"wte": [3, 7]}},
    },
    "t5": {
        "cross_attention": {"positions": EVERY_POSITION, "share_layers": 2, "train_layer_norm": "all"},
        "cross_attention alone": {"positions": ("cross_attention",)},
        "target_modules, list": {"target_modules": ["DenseReluDense.wo"]},
        "target_modules, regex": {
            "target_modules": r"decoder\.block\.\d\.layer\.2\.DenseReluDense\.wo",
            "share_layers": 3,
        },
        "layers_to_transform": {"layers_to_transform": [1], "layers_pattern": "block"},
        "rank_pattern": {"rank_pattern": {r"decoder\..*": 2}},
        "exclude_modules": {"exclude_modules": r"encoder\..*"},
        "init_std": {"init_std": 0.0},
    },
    "bart": {"cross_attention": {"positions": EVERY_POSITION, "share_layers": 3}},
    "whisper": {"cross_attention": {"positions": EVERY_POSITION, "share_layers": 1}},
    "home-made": {
        "own": {"modules_to_save": ["classifier"]},
        "shared": {"modules_to_save": ["classifier"], "share_layers": 3},
        "no norms": {"train_layer_norm": False, "share_layers": 1},
    },
    "stablelm": {"own": {"train_layer_norm": "all"}, "shared": {"share_layers": 3}},
}
GRID = [name for name in MODELS if name not in ("stablelm", "llama", "bart")]


def _all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, share_layers, norms in itertools.product(GRID, SHARED, NORMS):
        options = {"share_layers": share_layers, "train_layer_norm": norms}
        cases[f"grid/{name}/share {share_layers}, norms {norms}"] = partial(everything, name, options)
    for name, several in OPTIONS.items():
        for label, options in several.items():
            cases[f"options/{name}/{label}"] = partial(everything, name, options)
    for name in ("bert", "gpt2", "t5"):
        for case in (mixed, stacks, averages, ablation, deletion, ways_to_load):
            cases[f"{case.__name__}/{name}"] = partial(case, name)
        for share_layers in (0, 3):
            cases[f"resumed/{name}/share {share_layers}"] = partial(resumed, name, {"share_layers": share_layers})
    for name in ("roberta", "gpt2-classifier", "home-made"):
        cases[f"mixed/{name}"] = partial(mixed, name)
    for name in ("bert", "gpt2"):
        for autocast in (True, False):
            cases[f"half_precision/{name}/autocast {autocast}"] = partial(half_precision, name, autocast)
    for name in ("bert", "llama"):
        cases[f"frozen_prefix/{name}"] = partial(frozen_prefix, name)
    for package in ("torchao", "bitsandbytes"):
        if find_spec(package):
            cases[f"quantized/{package}"] = partial(quantized, package)
    for case in (two_layer_head, predictions, task_bank):
        cases[case.__name__] = case
    return cases


CASES = _all_cases()
