"""Every public function refuses its likely mistakes with a line that helps, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import get_peft_model
from transformers import TrainingArguments

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig, HubError
from houlsby_peft.serving.question_answering import QuestionAnswering
from hub_models import make_adapter, make_base
from tiny_models import tiny_bert


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> SimpleNamespace:
    """What the mistakes are made with; `model` has an adapter in its upper layers."""
    base = make_base(tmp_path_factory.mktemp("base"))
    folder = make_adapter(tmp_path_factory.mktemp("adapter"), base, str(base))
    predictor = houlsby_peft.load(folder)
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=2, layers_to_transform=[2, 3]))
    return SimpleNamespace(
        folder=folder,
        predictor=predictor,
        bank=houlsby_peft.TaskBank({"a": folder}),
        model=model,
        plain=tiny_bert(),
        empty=tmp_path_factory.mktemp("empty"),
    )


def config(**fields: Any) -> Callable[[SimpleNamespace], Any]:
    return lambda w: HoulsbyConfig(**fields)


def added(**fields: Any) -> Callable[[SimpleNamespace], Any]:
    """Add an adapter, which must change nothing if it fails."""

    def add(w: SimpleNamespace) -> None:
        base = tiny_bert()
        before = [name for name, _ in base.named_modules()]
        try:
            get_peft_model(base, HoulsbyConfig(r=2, **fields))
        except (ValueError, TypeError):
            assert [name for name, _ in base.named_modules()] == before
            raise

    return add


def ablated(model: Any, layers: Any) -> None:
    with houlsby_peft.ablate(model, layers):
        pass


h = houlsby_peft
# What is called, and words of the message.
MISTAKES: list[tuple[Callable[[SimpleNamespace], Any], str]] = [
    (config(init_weights="eva"), "init_weights must be True or False; got 'eva'"),
    (config(init_std=float("inf")), "init_std must be a number"),
    (config(init_std=float("nan")), "init_std must be a number"),
    (config(init_std=True), "init_std must be a number"),
    (config(dropout=float("nan")), r"dropout must be a probability"),
    (config(share_layers=True), "share_layers must be a whole number"),
    (config(positions=[["attention"]]), "positions must be one or more of"),
    (config(modules_to_save="classifier"), "modules_to_save must be None or a list of module names"),
    (config(modules_to_save=[""]), "modules_to_save must be None or a list of module names"),
    (config(target_modules="("), "target_modules must be a non-empty list .* regular expression; got '\\('"),
    (config(target_modules=[]), "target_modules must be a non-empty list"),
    (config(target_modules=7), "target_modules must be a non-empty list"),
    (config(exclude_modules="*"), "exclude_modules must be a list of name suffixes or a regular expression"),
    (config(layers_to_transform=[0], layers_pattern="["), "layers_pattern must be the name of a list of layers"),
    (config(rank_pattern=["output"]), "rank_pattern must be a dict"),
    (config(rank_pattern={"(": 2}), "rank_pattern must be a dict from names or regular expressions"),
    (config(rank_pattern={"output": "2"}), "rank_pattern must be a dict .* whole numbers"),
    (config(rank_pattern={"output": True}), "rank_pattern must be a dict .* whole numbers"),
    (config(trainable_token_indices=[-1]), "trainable_token_indices must be a list of different tokens"),
    (config(trainable_token_indices="a"), "trainable_token_indices must be a list of different tokens"),
    (config(id2label=["a"]), "id2label must be a dict from every number"),
    (config(id2label={0: "\ud800"}), "id2label must be a dict from every number"),
    (config(id2label={}), "id2label must be a dict from every number"),
    (config(problem_type=["regression"]), "problem_type must be one of"),
    (config(two_layer_head="yes"), "two_layer_head must be True or False"),
    (config(inference_mode="no"), "inference_mode must be True or False"),
    (config(revision=3), "revision must be a branch"),
    (config(recorded="x"), "recorded must be the record from an adapter's file"),
    (config(task_type="SHELL"), "Invalid task type"),
    (added(target_modules=["output.dropout", "outptu.dense"]), "target_modules must name modules .* 'outptu.dense'"),
    (added(modules_to_save=["poler"]), r"modules_to_save must name modules in the model; .* 'poler'. print\(model\)"),
    (added(rank_pattern={"query": 2}), "rank_pattern must name places of bottlenecks .* 'query'"),
    (added(layers_to_transform=[0], layers_pattern="blocks"), "layers_pattern"),
    (added(exclude_modules=["dropout"]), "exclude_modules|excluded"),
    (added(trainable_token_indices={"nothing": [1]}), r"'nothing', which is not found .*\. print\(model\) shows"),
    (lambda w: h.load(""), "An adapter must be a folder|holds no adapter_config.json"),
    (lambda w: h.load("./nothing"), r"An adapter must be a folder, .*; \./nothing is neither"),
    (lambda w: h.load("a/b/c"), "An adapter must be a folder, .*; a/b/c is neither"),
    (lambda w: h.load(w.empty), "holds no adapter_config.json"),
    (lambda w: h.load(w.folder.parent), "Give the folder of an adapter in it, such as "),
    (lambda w: h.load(None), "An adapter must be a folder|expected str"),
    (lambda w: h.load(w.folder, base_model=w.empty), "base model"),
    (
        lambda w: h.load(w.folder, base_model=w.predictor.model),
        "base_model must be a model of transformers, without PEFT",
    ),
    (lambda w: h.load(w.folder, beside="default"), "beside must be what houlsby_peft.load returned"),
    (lambda w: h.load(w.folder, beside=w.predictor, adapter_name="default"), "must be new to its model"),
    (lambda w: h.load(w.folder, beside=w.predictor, adapter_name="a.b"), "one that a module can have"),
    (lambda w: h.load(w.folder, device="gpu"), "device must be one that torch knows, .*; got 'gpu'"),
    (lambda w: h.load(w.folder, device="cuda:99"), "device must be one that this machine has; got 'cuda:99' .* CPU"),
    (lambda w: h.load(w.folder, dtype="float33"), "dtype must be a dtype"),
    (lambda w: w.predictor.predict(None), "Each input must be a text or a pair of texts; got None"),
    (lambda w: w.predictor.predict([("a", "b", "c")]), r"Each input must be .*; got \('a', 'b', 'c'\)"),
    (lambda w: w.predictor.predict(["a", 3]), "Each input must be .*; got 3"),
    (lambda w: w.predictor.predict({"text": "a"}), "Each input must be .*; got {'text': 'a'}"),
    (lambda w: w.predictor.predict("\ud800"), "Each input must be text that UTF-8 can hold"),
    (lambda w: w.predictor.predict(["a"], batch_size=0), "batch_size must be a whole number of at least 1; got 0"),
    (lambda w: w.predictor.predict(["a"], batch_size=2.0), "batch_size must be a whole number"),
    (lambda w: h.TaskBank([w.folder]), "TaskBank needs a dict"),
    (lambda w: h.TaskBank({"a": w.folder}, max_bytes=-1), "max_bytes must be a number of bytes, at least 0; got -1"),
    (lambda w: w.bank.predict([("a", "x")], batch_size=-1), "batch_size must be a whole number of at least 1; got -1"),
    (lambda w: w.bank.predict(["x"]), "Each request must be a pair of a task and its input; got 'x'"),
    (lambda w: w.bank.predict([("b", "x")]), "Tasks must be among those of the bank: a; got b"),
    (lambda w: w.bank.predict([("a", 5)]), "Each input must be a text or a pair of texts; got 5"),
    (lambda w: QuestionAnswering(w.plain, None, stride=-1), "stride must be a whole number of at least 0"),
    (lambda w: QuestionAnswering(w.plain, None, max_length=0), "max_length must be a whole number of at least 1"),
    (lambda w: QuestionAnswering(w.plain, None, max_answer_length=0), "max_answer_length must be a whole number"),
    (lambda w: h.push_to_hub(w.empty, "user/x"), "holds no adapter_config.json"),
    (lambda w: h.push_to_hub(w.plain, "user/x"), "adapter must be a PeftModel or the folder of a saved adapter"),
    (lambda w: h.push_to_hub(w.folder, None), "repo_id must be user/name"),
    (lambda w: h.push_to_hub(w.folder, "./x", base_model="org/base"), r"\./x: the Hub does not accept this name"),
    (lambda w: h.push_to_hub(w.folder, "user/x", metadata=[1]), "metadata must be a mapping such as"),
    (lambda w: h.push_to_hub(w.folder, "user/x", base_model="org/base", results=3), "results must be a results.json"),
    (
        lambda w: h.plan_push(TrainingArguments("out", push_to_hub=True), str(w.folder)),
        "The base model must be on the",
    ),
    (lambda w: h.FrozenPrefix(w.model, max_bytes=-1), "max_bytes must be a number of bytes, at least 0; got -1"),
    (lambda w: h.FrozenPrefix(w.model, max_bytes=float("nan")), "max_bytes must be a number of bytes"),
    (lambda w: h.FrozenPrefix(w.plain), "model must be a PeftModel"),
    (lambda w: h.init_from(w.model, w.folder, "other"), "init_from initializes one of the model's Houlsby adapters"),
    (lambda w: h.init_from(w.plain, w.folder), "model must be a PeftModel"),
    (lambda w: h.init_from(w.model, w.empty), "adapter_config.json"),
    (lambda w: h.init_from(w.model, "/nowhere"), "An adapter must be a folder, .*; /nowhere is neither"),
    (lambda w: h.init_from(w.model, "runs/no/adapter"), "An adapter must be a folder, .*; runs/no/adapter is neither"),
    (lambda w: HoulsbyConfig.from_pretrained("./no"), r"An adapter must be a folder, .*; \./no is neither"),
    (lambda w: ablated(w.model, [0]), r"layers that have a Houlsby adapter, here \[2, 3\]; got \[0\]"),
    (lambda w: ablated(w.model, 2), "layers must be indices of layers"),
    (lambda w: ablated(w.model, ["2"]), "layers must be indices of layers"),
    (lambda w: ablated(w.plain, [0]), "layers that have a Houlsby adapter, here none"),
    (lambda w: h.prune(w.model, [2, 3], "small"), "needs at least one bottleneck"),
    (lambda w: h.prune(w.model, [2], "default"), "to a new name; got"),
    (lambda w: h.prune(w.plain, [2], "small"), "model must be a PeftModel"),
    (lambda w: w.model.add_weighted_adapter(["default", "x"], [1.0, 1.0], "sum"), "Only adapters of the model can be"),
    (lambda w: w.model.add_weighted_adapter(["default"], [], "sum"), "Each adapter must have one weight"),
    (lambda w: h.put_two_layer_head(tiny_bert().bert), "Only a head that is one linear layer"),
    (lambda w: h.put_two_layer_head("bert"), "model must be a model of transformers"),
    (lambda w: h.placement_map("bert"), "model must be a model; got 'bert'"),
    (lambda w: h.placement_map(w.plain, {"r": 4}), "config must be a HoulsbyConfig; got"),
    (
        lambda w: h.find_places(w.plain, HoulsbyConfig(layers_to_transform=9)),
        "among this model's layers, 0 to 3; got 9",
    ),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_each_mistake_is_refused_with_a_line_that_helps(number, world, monkeypatch):
    monkeypatch.chdir(world.empty)
    call, words = MISTAKES[number]
    before = [name for name, _ in world.model.named_modules()], list(world.model.peft_config)
    with pytest.raises((AdapterError, HubError, ValueError, TypeError)) as caught:
        call(world)
    error = caught.value
    assert re.search(words, str(error)), str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < 1500
    assert ([name for name, _ in world.model.named_modules()], list(world.model.peft_config)) == before


def test_the_table_has_every_public_function():
    text = Path(__file__).read_text()
    functions = ("load", "push_to_hub", "plan_push", "TaskBank", "FrozenPrefix", "init_from", "put_two_layer_head",
                 "placement_map", "find_places", "ablate", "prune", "HoulsbyConfig")  # fmt: skip
    assert not [name for name in functions if f"h.{name}(" not in text and f"{name}(" not in text]
