"""New adapters from existing ones: without layers (ablate, prune), combined, initialized from a
saved one.

Each is compared with plain computation on the modules or on the tensors of the saved files.
"""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
)
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

import houlsby_peft
from contract_models import ROWS, output
from houlsby_peft import AdapterError, HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.heads.head import HoulsbyHead
from tiny_models import perturb, tiny_bert


def adapted(dtype=torch.float32, autocast=True, seed=1, **options):
    model = get_peft_model(
        tiny_bert().to(dtype),
        HoulsbyConfig(**{"r": 4, **options}),
        "one",
        autocast_adapter_dtype=autocast,
    )
    perturb(model, seed=seed)
    return model.eval()


def two_adapters(one=None, two=None, dtype=torch.float32, autocast=True):
    model = adapted(dtype, autocast, **(one or {}))
    model.add_adapter(
        "two", HoulsbyConfig(**{"r": 4, **(two or {})}), autocast_adapter_dtype=autocast
    )
    model.set_adapter("two")
    perturb(model, seed=2)
    return model.eval()


def logits(model, token_ids):
    with torch.no_grad():
        return model(input_ids=token_ids).logits


def tensors(model, name):
    return {
        key: tensor.clone()
        for key, tensor in get_peft_model_state_dict(model, adapter_name=name).items()
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def in_layer_1(name):
    return bool(index := re.search(r"\.(\d+)\.", name)) and index[1] == "1"


class TestWithoutLayers:
    """`ablate` and `prune`."""

    @pytest.mark.parametrize(
        ("name", "keep_norms"),
        [
            ("bert, sizes by place", True),
            ("bert, 3-shared", False),
            ("gpt2, parallel with an invertible module", True),
            ("t5", False),
        ],
    )
    def test_the_layers_are_bypassed_as_by_hand_and_the_pruned_adapter_loads(
        self, name, keep_norms, tmp_path
    ):
        row = next(row for row in ROWS if row.name == name)
        model = get_peft_model(row.base(), HoulsbyConfig(**row.first)).eval()
        perturb(model)
        before = output(model, row)
        with houlsby_peft.ablate(model, [1], keep_norms):
            ablated = output(model, row)
        assert torch.equal(output(model, row), before)
        houlsby_peft.prune(model, [1], "small", keep_norms=keep_norms)
        assert torch.equal(output(model, row), before)
        model.save_pretrained(tmp_path, selected_adapters=["small"])
        loaded = PeftModel.from_pretrained(row.base(), tmp_path / "small").eval()
        assert torch.equal(output(loaded, row), ablated)
        bottlenecks = [
            name for name, module in loaded.named_modules() if isinstance(module, HoulsbyLayer)
        ]
        assert not any(in_layer_1(name) for name in bottlenecks)
        # By hand: without the wrappers in the module tree.
        wrappers = (HoulsbyLayer,) if keep_norms else (HoulsbyLayer, HoulsbyLayerNorm)
        for name, module in list(model.named_modules()):
            if isinstance(module, wrappers) and in_layer_1(name):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, module.base_layer)
        assert torch.equal(output(model, row), ablated)
        assert not torch.allclose(ablated, before, atol=1e-3)

    def test_ablated_blocks_nest_and_end_after_an_error_and_keep_disabled_adapters_disabled(
        self, token_ids
    ):
        model = adapted()
        before = logits(model, token_ids)
        with houlsby_peft.ablate(model, [0, 1]):
            both = logits(model, token_ids)
        with houlsby_peft.ablate(model, [1]):
            one = logits(model, token_ids)
            with suppress(KeyError), houlsby_peft.ablate(model, [0, 1]):
                assert torch.equal(logits(model, token_ids), both)
                raise KeyError
            assert torch.equal(logits(model, token_ids), one)
        with model.disable_adapter():
            base = logits(model, token_ids)
            with houlsby_peft.ablate(model, [0], keep_norms=False):
                assert torch.equal(logits(model, token_ids), base)
        assert torch.equal(logits(model, token_ids), before)

    def test_other_layers_still_train_and_every_wrapper_is_accepted(self, token_ids):
        model = adapted()
        injected = inject_adapter_in_model(HoulsbyConfig(r=4), tiny_bert(), "one").eval()
        injected.load_state_dict(model.get_base_model().state_dict())
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        with houlsby_peft.ablate(model, [0, 2], keep_norms=False):
            model(input_ids=token_ids).logits.sum().backward()
            expected = logits(model, token_ids)
        without = {
            name
            for name, weight in model.named_parameters()
            if weight.requires_grad and weight.grad is None
        }
        assert {
            name for name, weight in model.named_parameters() if weight.requires_grad
        } == trained
        assert {name for name in trained if re.search(r"layer\.[02]\.", name)} == without
        for other in (model.base_model, model.get_base_model(), injected):
            with houlsby_peft.ablate(other, [0, 2], keep_norms=False):
                assert torch.equal(logits(other, token_ids), expected)

    def test_adapter_drop_skips_a_random_number_of_the_lowest_layers_in_each_step(
        self, token_ids, tmp_path
    ):
        model = adapted(layers_to_transform=[0, 1, 2])
        rows = [
            {"input_ids": ids, "labels": torch.tensor(number % 2)}
            for number, ids in enumerate(token_ids)
        ]
        steps = []

        class Trained(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, **kwargs):
                names = [
                    name for name, weight in model.named_parameters() if weight.grad is not None
                ]
                steps.append(
                    {
                        int(layer[1])
                        for name in names
                        if (layer := re.search(r"\.layer\.(\d)\.", name))
                    }
                )

        def train(**options):
            args = TrainingArguments(
                tmp_path, seed=3, max_steps=12, per_device_train_batch_size=2, use_cpu=True,
                report_to="none", disable_tqdm=True, save_steps=6, **options,
            )  # fmt: skip
            trainer = Trainer(
                model, args, train_dataset=rows, callbacks=[houlsby_peft.AdapterDrop(), Trained()]
            )
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6") if steps else None)
            return trainer

        trainer = train(learning_rate=1e-2)
        assert {frozenset(step) for step in steps} == {
            frozenset({2}),
            frozenset({1, 2}),
            frozenset({0, 1, 2}),
        }
        assert trainer.predict(rows).predictions == pytest.approx(
            logits(model, token_ids).numpy(), abs=1e-5
        )
        last = steps[6:]
        train(learning_rate=1e-2)
        assert steps[12:] == last
        whole, state = logits(model.eval(), token_ids), TrainerState(global_step=steps.index({2}))
        houlsby_peft.AdapterDrop().on_step_begin(
            trainer.args, state, None, model=model
        )  # and an interrupt
        assert torch.equal(logits(model, token_ids), whole)

    def test_rows_of_a_mixed_batch_are_bypassed_as_well(self, token_ids):
        model = two_adapters(two={"layers_to_transform": [2]})
        names = ["one", "two", "__base__", "two", "one"]
        with houlsby_peft.ablate(model, [2]), torch.no_grad():
            mixed = model(input_ids=token_ids, adapter_names=names).logits
            for name in ("one", "two"):
                model.set_adapter(name)
                rows = [row for row, other in enumerate(names) if other == name]
                torch.testing.assert_close(
                    mixed[rows], logits(model, token_ids)[rows], atol=1e-5, rtol=1e-5
                )

    @pytest.mark.parametrize(
        ("options", "dtype", "autocast"),
        [
            ({"dropout": 0.5, "share_layers": 3, "train_layer_norm": "all"}, torch.float32, True),
            ({}, torch.bfloat16, True),
            ({}, torch.bfloat16, False),
        ],
        ids=str,
    )
    def test_a_pruned_adapter_is_like_its_source_and_can_be_pruned_again(
        self, options, dtype, autocast, token_ids
    ):
        model = adapted(dtype, autocast, **options)
        with houlsby_peft.ablate(model, [0, 3], keep_norms=False):
            expected = logits(model, token_ids)
        houlsby_peft.prune(model, [3], "small", source="one", keep_norms=False)
        houlsby_peft.prune(model, [0], "smaller", source="small", keep_norms=False)
        assert model.active_adapters == ["one"]
        assert {weight.dtype for weight in tensors(model, "smaller").values()} == {
            weight.dtype for weight in tensors(model, "one").values()
        }
        model.set_adapter("smaller")
        assert torch.equal(logits(model, token_ids), expected)

    def test_layers_and_names_that_do_not_exist_are_refused(self):
        model = adapted(layers_to_transform=[2, 3])
        for layers in ([1], [-1], [2, 9]):
            with pytest.raises(
                ValueError, match=rf"here \[2, 3\]; got {re.escape(str(sorted(layers)))}"
            ):
                houlsby_peft.ablate(model, layers).__enter__()
        with pytest.raises(ValueError, match="here none"):
            houlsby_peft.ablate(tiny_bert(), [0]).__enter__()
        for layers, name, source, message in (
            ([2], "one", "one", "adapter_name must be unused"),
            ([2], "small", "unknown", "unknown"),
            ([2, 3], "small", "one", "needs a sub-layer"),
        ):
            with pytest.raises((ValueError, KeyError), match=message):
                houlsby_peft.prune(model, layers, name, source)
        # Nothing is left of one that cannot be filled.
        with torch.no_grad():
            model.get_base_model().classifier.modules_to_save["one"].bias.fill_(torch.nan)
        with pytest.raises(ValueError, match="finite"):
            houlsby_peft.prune(model, [2], "small", "one")
        assert set(model.peft_config) == {"one"}
        assert not any(".small." in key for key in model.state_dict())


class TestCombined:
    """`add_weighted_adapter`; `test_contract.py` compares averages on other models to the files."""

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            ({"modules_to_save": ["pooler"]}, {"modules_to_save": ["pooler"]}),
            (
                {"share_layers": 3, "layers_to_transform": [0, 3]},
                {"share_layers": 3, "layers_to_transform": [0, 3]},
            ),
            # The same places, which were selected in other words.
            ({}, {"layers_to_transform": [0, 1, 2, 3], "exclude_modules": ["nothing"]}),
            (
                {"positions": ["feed_forward"], "train_layer_norm": False},
                {"target_modules": ["output.dropout"], "train_layer_norm": False}
                | {"exclude_modules": ["attention.output.dropout"]},
            ),
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
    def test_weighted_sums_of_equal_adapters(self, one, two, tmp_path, token_ids):
        weights = {"one": 0.25, "two": 0.75}
        model = two_adapters(one, two)
        model.base_model.add_weighted_adapter([*weights], [*weights.values()], "both")

        def check(found, parts):
            expected = sum(weights[name] * part for name, part in parts.items())
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

        for module in model.get_base_model().modules():
            if isinstance(module, HoulsbyLayer):
                both = module.bottleneck("both")
                parts = {
                    name: part for name in weights if (part := module.bottleneck(name)) is not None
                }
                assert (both is None) is (not parts)
                if parts:
                    check(
                        both.up_proj.bias, {name: part.up_proj.bias for name, part in parts.items()}
                    )
            elif isinstance(module, HoulsbyLayerNorm):
                check(
                    module.norm("both").weight, {name: module.norm(name).weight for name in weights}
                )
            elif isinstance(module, HoulsbyHead):
                heads = {
                    name: next(head.parameters()) for name, head in module.modules_to_save.items()
                }
                check(heads.pop("both"), heads)
        model.set_adapter("both")
        model.save_pretrained(tmp_path, selected_adapters=["both"])
        again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "both").eval()
        torch.testing.assert_close(
            logits(again, token_ids), logits(model, token_ids), atol=1e-6, rtol=1e-6
        )

    @pytest.mark.parametrize("autocast", [True, False])
    def test_an_average_keeps_the_dtype_and_is_summed_in_float32(self, autocast):
        model = two_adapters(dtype=torch.bfloat16, autocast=autocast)
        # In bfloat16 the sum of the first two terms would round the second one away.
        model.base_model.add_weighted_adapter(["one", "two", "one"], [1e4, 1.0, -1e4], "mean")
        two, mean = tensors(model, "two"), tensors(model, "mean")
        for key in two:
            assert mean[key].dtype == two[key].dtype
            torch.testing.assert_close(mean[key].float(), two[key].float(), atol=2e-3, rtol=1e-2)

    def test_adapters_without_a_head_make_one_without_a_head(self, tmp_path, token_ids):
        language_model = BertForMaskedLM(tiny_bert().config)
        language_model.bert = tiny_bert().bert
        model = get_peft_model(language_model, HoulsbyConfig(r=4))
        perturb(model)
        model.save_pretrained(tmp_path)
        model = PeftModel.from_pretrained(tiny_bert(), tmp_path)
        expected = logits(model, token_ids)
        model.base_model.add_weighted_adapter(["default"], [1.0], "mean")
        houlsby_peft.prune(model, [0], "small")
        model.set_adapter("mean")
        assert torch.equal(logits(model, token_ids), expected)
        assert not any("modules_to_save" in key for key in model.state_dict())

    @pytest.mark.parametrize(
        ("one", "two", "weights", "message"),
        [
            ({}, {"r": 3}, [1, 1], "r is 4 and 3. Train them with the same configuration"),
            ({"share_layers": 3}, {"share_layers": 1}, [1, 1], "share_layers is 3 and 1"),
            (
                {"train_layer_norm": False},
                {"train_layer_norm": False, "layers_to_transform": [0, 1, 2]}, [1, 1],
                r"only 'one' has "
                r".*encoder\.layer\.3\.attention\.output\.dropout\.houlsby_adapter\.",
            ),
            (
                {"share_layers": 3, "layers_to_transform": [0, 1]}, {"share_layers": 3}, [1, 1],
                r"only 'two' has .*encoder\.layer\.",
            ),
            ({"train_layer_norm": False}, {}, [1, 1], "only 'two' has .*LayerNorm"),
            ({"modules_to_save": []}, {}, [1, 1], "only 'two' has .*classifier"),
            ({"id2label": {0: "a"}}, {}, [1, 1], r"classifier.* has the shapes \(1.* and \(3"),
            (
                {"positions": ["feed_forward"]}, {"kind": "pfeiffer"}, [1, 1],
                "kind is 'houlsby' and 'pfeiffer'",
            ),
            ({"activation": "relu"}, {}, [1, 1], "activation is 'relu' and 'gelu'"),
            ({"scaling": "learned"}, {}, [1, 1], "scaling is 'learned' and 1.0"),
            ({}, {}, [float("nan"), 1], "finite"),
            # The mean of the rows of two classes would be called one of them.
            (
                {"id2label": {0: "bad", 1: "good"}}, {"id2label": {0: "good", 1: "bad"}}, [1, 1],
                r"the classes are \{0: 'bad', 1: 'good'\} and \{0: 'good', 1: 'bad'\}",
            ),
        ],
        ids=str,
    )  # fmt: skip
    def test_what_cannot_be_combined_is_refused(self, one, two, weights, message):
        model = two_adapters(one, two)
        before = set(model.state_dict())
        with pytest.raises(ValueError, match=message):
            model.base_model.add_weighted_adapter(["one", "two"], weights, "both")
        assert set(model.state_dict()) == before
        assert list(model.peft_config) == ["one", "two"]

    def test_what_half_precision_cannot_hold_and_unknown_names_are_refused(self):
        model = two_adapters(dtype=torch.float16, autocast=False)
        before = set(model.state_dict())
        with pytest.raises(ValueError, match=r"must hold finite numbers of torch\.float16"):
            model.base_model.add_weighted_adapter(["one", "two"], [1e6, 1], "both")
        for adapters, name in ((["one", "three"], "mean"), (["one", "two"], "two")):
            with pytest.raises((ValueError, KeyError), match=r"three|adapter_name must be unused"):
                model.base_model.add_weighted_adapter(adapters, [1.0] * len(adapters), name)
        assert set(model.state_dict()) == before


class TestInitialized:
    """`init_from`."""

    @pytest.mark.parametrize(
        ("name", "options", "bottlenecks"),
        [
            ("one", {}, 8),
            ("second", {"share_layers": 3}, 2),
            ("one", {"train_layer_norm": "all", "layers_to_transform": [1, 3]}, 4),
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
    def test_bottlenecks_and_norms_are_the_saved_ones_and_the_head_is_not(
        self, name, options, bottlenecks, tmp_path
    ):
        """The source may have another head, and exclude what only its model has."""
        config = HoulsbyConfig(r=4, exclude_modules=["cls.LayerNorm"], **options)
        source = get_peft_model(tiny_bert(num_labels=5), config, "one")
        perturb(source, seed=5)
        source.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "one" / "adapter_model.safetensors")
        model = adapted(**options)
        model.add_adapter("second", HoulsbyConfig(r=4, **options))
        head, other = tensors(model, name), {"one": "second", "second": "one"}[name]
        untouched = tensors(model, other)
        houlsby_peft.init_from(model, tmp_path / "one", name)
        found = tensors(model, name)
        assert sum(key.endswith("down_proj.weight") for key in found) == bottlenecks
        assert_equal(found, {key: (saved if ".houlsby_" in key else head)[key] for key in head})
        assert_equal(tensors(model, other), untouched)

    @pytest.mark.parametrize(
        ("there", "here", "message"),
        [
            ({}, {"r": 8}, "r is 4 and 8"),
            ({}, {"activation": "relu"}, "activation is 'gelu' and 'relu'"),
            ({}, {"layers_to_transform": [0]}, r"layers_to_transform is None and \[0\]"),
            ({}, {"exclude_modules": ["layer.0.output.dropout"]}, "no place for"),
            # The file holds the owner's weights alone, whichever places are left out.
            (
                {
                    "share_layers": 4,
                    "exclude_modules": ["layer.1.output.dropout"],
                    "train_layer_norm": False,
                },
                {"share_layers": 4, "train_layer_norm": False},
                r"only one has a bottleneck at encoder\.layer\.1\.output\.dropout",
            ),
        ],
        ids=str,
    )
    def test_another_adapter_is_refused_and_nothing_changes(self, there, here, message, tmp_path):
        adapted(**there).save_pretrained(tmp_path)
        model = adapted(**here)
        before = tensors(model, "one")
        with pytest.raises(ValueError, match=message):
            houlsby_peft.init_from(model, tmp_path / "one", "one")
        assert_equal(tensors(model, "one"), before)

    def test_other_bases_methods_and_damaged_files_are_refused(self, tmp_path):
        model = adapted()
        before = tensors(model, "one")
        other = get_peft_model(tiny_bert(seed=1), HoulsbyConfig(r=4))
        other.save_pretrained(tmp_path / "base")
        get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"])).save_pretrained(
            tmp_path / "lora"
        )
        model.save_pretrained(tmp_path / "damaged")
        file = tmp_path / "damaged" / "one" / "adapter_model.safetensors"
        saved = load_file(file)
        save_file(
            {key: tensor for key, tensor in saved.items() if "layer.0.output.dropout" not in key},
            file,
        )
        for folder, message in (
            ("base", "on the same base model; .*other weights in"),
            ("lora", "must have peft_type .HOULSBY."),
            ("damaged/one", "lacks .*down_proj"),
        ):
            with pytest.raises((AdapterError, ValueError), match=message):
                houlsby_peft.init_from(model, tmp_path / folder, "one")
        assert_equal(tensors(model, "one"), before)
