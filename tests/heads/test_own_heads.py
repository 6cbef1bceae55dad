"""An adapter with a head of its own: other labels than the base model's, a hidden layer, the base
unchanged.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import PeftModel, PeftModelForSequenceClassification, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

from architecture_cases import CASES
from houlsby_peft import AdapterError, HoulsbyConfig
from model_states import assert_same_tensors, tensors_of, trained_names
from tiny_models import TINY_BERT, adapted, perturb, perturb_adapter, tiny_bert


def labels(number: int) -> dict[int, str]:
    return dict(enumerate("abcdefgh"[:number]))


def tiny_roberta(**changes) -> RobertaForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    config = RobertaConfig(**sizes, num_attention_heads=2, **changes)
    return RobertaForSequenceClassification(config).eval()


def with_other_heads(base):
    """A base model for two classes with adapters for two classes, for five, and for a score."""
    model = get_peft_model(base, HoulsbyConfig(r=4), adapter_name="two").eval()
    model.add_adapter("five", HoulsbyConfig(r=4, id2label=labels(5)))
    model.add_adapter("one", HoulsbyConfig(r=4, id2label={0: "score"}))
    for seed, name in enumerate(model.peft_config):
        perturb_adapter(model, name, seed)
    return model


def trained_heads(model):
    """The weights of heads that train, each without the name of its module."""
    heads = set()
    for name in trained_names(model):
        _, is_head, weight = name.partition(".modules_to_save.")
        if is_head:
            heads.add(weight)
    return heads


every_model = pytest.mark.parametrize("make", [tiny_bert, tiny_roberta])


@every_model
def test_adapters_with_other_numbers_of_labels_on_one_base_model(make, token_ids):
    model, alone = with_other_heads(make(num_labels=2)), {}
    with model.disable_adapter():
        alone["__base__"] = model(token_ids).logits
    for name, outputs in {"two": 2, "five": 5, "one": 1}.items():
        model.set_adapter(name)
        alone[name] = model(token_ids).logits
        assert alone[name].shape == (5, outputs)
        assert {weight.partition(".")[0] for weight in trained_heads(model)} == {name}
    names = ["five", "two", "one", "__base__", "five"]
    mixed = model(token_ids, adapter_names=names).logits
    for row, name in enumerate(names):
        expected = alone[name][row]
        torch.testing.assert_close(mixed[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)
        assert (mixed[row, len(expected) :] == float("-inf")).all()


@every_model
def test_unloading_gives_the_base_models_own_head_back(make):
    unloaded = with_other_heads(make(num_labels=2)).unload()
    assert_same_tensors(unloaded.state_dict(), make(num_labels=2).state_dict())


@every_model
def test_heads_load_on_a_base_model_with_another_number_of_labels(make, tmp_path):
    with_other_heads(make(num_labels=2)).save_pretrained(tmp_path)
    # A pipeline would read three labels from the model's configuration.
    with pytest.warns(UserWarning, match=r"other labels \(5\) than .* \(3\)"):
        loaded = PeftModel.from_pretrained(
            make(num_labels=3), tmp_path / "five", adapter_name="task_1"
        )
    assert loaded.base_model.records["task_1"].id2label == labels(5)
    loaded.load_adapter(tmp_path / "one", "task_2")
    for folder, name in (("five", "task_1"), ("one", "task_2")):
        saved = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert_same_tensors(tensors_of(loaded, name), saved)


def test_a_new_head_is_initialized_as_the_models_own():
    model = get_peft_model(
        tiny_bert(initializer_range=0.02), HoulsbyConfig(r=4, id2label=labels(8))
    )
    head = model.base_model.model.classifier.modules_to_save["default"]
    assert head.bias.eq(0).all()
    assert 0.01 < head.weight.std() < 0.03
    assert head.weight.requires_grad


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
@pytest.mark.parametrize(
    ("options", "of_base", "targets", "loss"),
    [
        ({"id2label": labels(3)}, 2, torch.tensor([0, 2, 1, 1, 2]), functional.cross_entropy),
        ({"id2label": labels(3)}, 1, torch.tensor([0, 2, 1, 1, 2]), functional.cross_entropy),
        ({"id2label": {0: "score"}}, 2, torch.rand(5, 1), functional.mse_loss),
        ({"problem_type": "regression"}, 2, torch.rand(5, 2), functional.mse_loss),
        ({"id2label": labels(3)}, 2, torch.eye(5, 3), functional.binary_cross_entropy_with_logits),
    ],
    ids=["more classes", "classes, not a score", "a score", "several scores", "several labels"],
)
def test_the_loss_is_that_of_the_active_adapters_labels(
    options, of_base, targets, loss, task_type, token_ids
):
    base = tiny_bert(num_labels=of_base)
    model = get_peft_model(base, HoulsbyConfig(r=4, task_type=task_type), "of_base").eval()
    model.add_adapter("own", HoulsbyConfig(r=4, task_type=task_type, **options))
    model.set_adapter("own")
    output = model(input_ids=token_ids, labels=targets)
    torch.testing.assert_close(output.loss, loss(output.logits, targets))
    in_order = (token_ids, None, None, None, None, targets)  # without names
    torch.testing.assert_close(model.get_base_model()(*in_order).loss, output.loss)
    assert (base.num_labels, base.config.problem_type) == (of_base, None)
    # Inferred from the labels, and recorded for predictions.
    has_several = loss is functional.binary_cross_entropy_with_logits
    problem_type = model.base_model.records["own"].problem_type
    assert (problem_type == "multi_label_classification") == has_several
    # The other adapter, and the base model, compute the base model's loss.
    targets = torch.tensor([0, 1, 1, 0, 1]) if of_base == 2 else torch.rand(5)
    loss = functional.cross_entropy if of_base == 2 else functional.mse_loss
    with model.disable_adapter():
        output = model(input_ids=token_ids, labels=targets)
    torch.testing.assert_close(output.loss, loss(output.logits.squeeze(), targets))
    model.set_adapter("of_base")
    output = model(input_ids=token_ids, labels=targets)
    torch.testing.assert_close(output.loss, loss(output.logits.squeeze(), targets))


@pytest.mark.parametrize(
    ("of_base", "problem_type", "number", "loss"),
    [
        (2, "regression", 2, functional.mse_loss),
        (2, "multi_label_classification", 3, functional.binary_cross_entropy_with_logits),
        (1, "regression", 1, functional.mse_loss),
        # A head with one output never has the same problem as one with several.
        (1, "regression", 3, functional.binary_cross_entropy_with_logits),
        (2, "single_label_classification", 1, functional.mse_loss),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_adapter_with_its_own_labels_has_the_base_models_problem_type(
    of_base, problem_type, number, loss, token_ids, tmp_path
):
    base = tiny_bert(num_labels=of_base, problem_type=problem_type)
    model = get_peft_model(base, HoulsbyConfig(r=4, id2label=labels(number))).eval()
    targets = torch.rand(5, number)
    output = model(input_ids=token_ids, labels=targets)
    torch.testing.assert_close(output.loss, loss(output.logits, targets))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_bert(num_labels=of_base), tmp_path)
    output = loaded(input_ids=token_ids, labels=targets)
    torch.testing.assert_close(output.loss, loss(output.logits, targets))


def test_the_loss_of_a_model_that_reads_the_number_of_labels_from_its_configuration(token_ids):
    config = BartConfig(
        **{**CASES["bart"].config, "vocab_size": 99},
        num_labels=2,
        problem_type="single_label_classification",
    )
    base = BartForSequenceClassification(config).eval()
    token_ids = torch.cat(
        [token_ids[:, :-1], torch.full((5, 1), config.eos_token_id)], dim=1
    ).where(torch.arange(token_ids.shape[1]) == token_ids.shape[1] - 1, token_ids.clamp(min=3))
    model = get_peft_model(base, HoulsbyConfig(r=4, id2label=labels(3))).eval()
    for targets in (torch.tensor([0, 2, 1, 1, 2]), torch.tensor([0, 1, 1, 0, 1])):
        output = model(input_ids=token_ids, labels=targets)
        torch.testing.assert_close(output.loss, functional.cross_entropy(output.logits, targets))
    with model.disable_adapter():
        output = model(input_ids=token_ids, labels=targets)
    assert output.logits.shape == (5, 2)
    torch.testing.assert_close(output.loss, functional.cross_entropy(output.logits, targets))
    output = model(input_ids=token_ids, labels=targets, adapter_names=["__base__"] * 5)
    assert output.logits.shape == (5, 2)
    torch.testing.assert_close(output.loss, functional.cross_entropy(output.logits, targets))


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
def test_a_head_does_not_train_before_its_adapter_is_active(task_type):
    """DistributedDataParallel would wait for its gradients."""
    model = get_peft_model(tiny_bert(), HoulsbyConfig(r=4, task_type=task_type))
    names = trained_names(model)
    for name, options in {"own": {"id2label": labels(4)}, "of_base": {}}.items():
        model.add_adapter(name, HoulsbyConfig(r=4, task_type=task_type, **options))
        assert trained_names(model) == names
    model.set_adapter("own")
    assert trained_heads(model) == {"own.weight", "own.bias"}


def test_an_adapter_without_a_head_on_a_model_that_has_a_task_type(token_ids, tmp_path):
    """PEFT's class names its heads in the configuration of every adapter."""
    words = BertForMaskedLM(BertConfig(**TINY_BERT))
    words.bert.load_state_dict(tiny_bert().bert.state_dict(), strict=False)  # all but the pooler
    get_peft_model(words, HoulsbyConfig(r=4)).save_pretrained(tmp_path / "none")
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4, modules_to_save=[])).save_pretrained(
        tmp_path / "left out"
    )
    get_peft_model(tiny_bert(), HoulsbyConfig(r=4)).save_pretrained(tmp_path / "task")
    model = PeftModel.from_pretrained(tiny_bert(), tmp_path / "task", adapter_name="task")
    assert isinstance(model, PeftModelForSequenceClassification)
    model.add_adapter("new", HoulsbyConfig(r=4, modules_to_save=[]))
    model.load_adapter(tmp_path / "none", "none")
    model.load_adapter(tmp_path / "left out", "left out")
    model.save_pretrained(tmp_path / "again")
    for name, saved in {"new": [], "none": None, "left out": []}.items():
        model.set_adapter(name)
        assert model(input_ids=token_ids).logits.isfinite().all()
        assert not trained_heads(model)
        config = HoulsbyConfig.from_pretrained(tmp_path / "again" / name)
        assert (config.modules_to_save, config.saved.record.heads) == (saved, [])
        PeftModel.from_pretrained(tiny_bert(), tmp_path / "again" / name)


@pytest.mark.parametrize("task_type", [None, "SEQ_CLS"])
def test_a_mixed_batch_has_no_loss(task_type, token_ids):
    model = get_peft_model(
        tiny_bert(), HoulsbyConfig(r=4, task_type=task_type, id2label={0: "score"}), "rating"
    ).eval()
    for name, options in {"three": {"id2label": labels(3)}, "of_base": {}}.items():
        model.add_adapter(name, HoulsbyConfig(r=4, task_type=task_type, **options))
    targets = torch.tensor([0, 1, 1, 0, 1])
    for names in (["three"] + ["rating"] * 4, ["of_base"] + ["__base__"] * 4):
        with pytest.raises(ValueError, match="rows of"):
            model(input_ids=token_ids, labels=targets, adapter_names=names)
        assert model(input_ids=token_ids, adapter_names=names).loss is None
    # One adapter, which need not be the active one, has its loss.
    output = model(input_ids=token_ids, labels=targets, adapter_names=["three"] * 5)
    torch.testing.assert_close(output.loss, functional.cross_entropy(output.logits, targets))


def test_the_base_models_configuration_and_the_users_stay_as_they_were(token_ids, tmp_path):
    base, config = tiny_bert(num_labels=2), HoulsbyConfig(r=4, id2label=labels(3))
    config_of_base = copy.deepcopy(base.config.to_dict())
    model = get_peft_model(base, config, "own")
    options = copy.deepcopy(config.to_dict())
    model.add_adapter("of_base", HoulsbyConfig(r=4))
    for name, outputs in {"own": 3, "of_base": 2}.items():
        model.set_adapter(name)
        # Labels of one kind leave nothing behind that would make the other kind fail.
        for targets, loss in (
            (torch.eye(5, outputs), functional.binary_cross_entropy_with_logits),
            (torch.tensor([0, 1, 1, 0, 1]), functional.cross_entropy),
            (torch.eye(5, outputs), functional.binary_cross_entropy_with_logits),
        ):
            output = model.eval()(input_ids=token_ids, labels=targets)
            torch.testing.assert_close(output.loss, loss(output.logits, targets))
        with model.disable_adapter():
            model(input_ids=token_ids)
        model.save_pretrained(tmp_path)
        # Predictions depend on what the last labels were.
        saved = HoulsbyConfig.from_pretrained(tmp_path / name).saved
        assert saved.record.problem_type == "multi_label_classification"
    assert config.to_dict() == options
    assert model.get_base_model().config is base.config
    assert base.config.to_dict() == config_of_base
    assert model.unload().config.to_dict() == config_of_base


def test_a_saved_adapter_is_loaded_over_one_with_the_same_labels(token_ids, tmp_path):
    """As a Trainer that resumes does, before any batch has told the problem type."""
    targets = torch.eye(5, 3)
    model = get_peft_model(tiny_bert(num_labels=3), HoulsbyConfig(r=4)).eval()
    model.get_base_model().config.id2label = labels(3)
    logits = model(input_ids=token_ids, labels=targets).logits
    model.save_pretrained(tmp_path)
    again = get_peft_model(tiny_bert(num_labels=3), HoulsbyConfig(r=4))
    with pytest.raises(AdapterError, match="id2label"):
        again.load_adapter(tmp_path, "default")
    assert again.base_model.records["default"].problem_type is None
    again.get_base_model().config.id2label = labels(3)
    again.load_adapter(tmp_path, "default", is_trainable=True)
    assert again.base_model.records["default"].problem_type == "multi_label_classification"
    assert torch.equal(again.eval()(token_ids).logits, logits)
    stated = HoulsbyConfig(r=4, problem_type="regression")
    again = get_peft_model(tiny_bert(num_labels=3, id2label=labels(3)), stated)
    with pytest.raises(AdapterError, match="problem_type"):
        again.load_adapter(tmp_path, "default")


@pytest.mark.parametrize("options", [{"id2label": labels(5)}, {"two_layer_head": True}], ids=str)
def test_a_model_without_a_head_cannot_give_one(options):
    model = BertModel(tiny_bert().config)
    with pytest.raises(ValueError, match="no head"):
        get_peft_model(model, HoulsbyConfig(r=4, **options))
    assert not getattr(model, "peft_config", None)


@pytest.mark.parametrize("own_labels", [{}, {"id2label": dict(enumerate("abcde"))}], ids=str)
def test_a_head_with_batch_norm(own_labels, tmp_path):
    """Its counts are whole numbers, which are saved and loaded with it."""
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    config = SegformerConfig(**sizes, decoder_hidden_size=8, num_labels=3)
    base = SegformerForSemanticSegmentation(config)
    encoder = copy.deepcopy(base)
    model = adapted(base, r=2, **own_labels)
    image = torch.randn(2, 3, 32, 32)
    model.train()(image)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(encoder, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert [int(saved[key]) for key in saved if "num_batches" in key] == [1]
    torch.testing.assert_close(loaded.eval()(image).logits, model.eval()(image).logits)


def test_threads_compute_the_losses_of_their_own_adapters_and_leave_the_base_model(token_ids):
    """Adapters with other labels by turns, in four threads on one model."""
    base = tiny_bert(num_labels=2)
    numbers = {"three": 3, "five": 5}
    model = get_peft_model(base, HoulsbyConfig(r=4, id2label=labels(3)), adapter_name="three")
    model.add_adapter("five", HoulsbyConfig(r=4, id2label=labels(5)))
    perturb(model.eval())
    settings = base.config.to_dict()
    row = token_ids[:1]
    targets = torch.tensor([1])

    def losses_are_right(thread):
        for turn in range(10):
            name = [*numbers][(thread + turn) % 2]
            output = model(input_ids=row, labels=targets, adapter_names=[name])
            # A mixed batch is padded with -inf to the widest head; this one is not mixed.
            assert output.logits.shape[-1] == numbers[name]
            torch.testing.assert_close(
                output.loss, functional.cross_entropy(output.logits, targets)
            )
        return True

    with ThreadPoolExecutor(4) as pool, torch.no_grad():
        assert all(pool.map(losses_are_right, range(4)))
    assert base.config.to_dict() == settings
    assert base.num_labels == 2
