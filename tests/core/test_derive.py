"""New adapters from existing ones: without layers (ablate, prune), combined, initialized from a
saved one.

Each is compared with plain computation on the modules or on the tensors of the saved files.
"""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from transformers import BertForMaskedLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

import houlsby_peft
from contract_models import ROWS, output
from houlsby_peft import AdapterError, HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from model_states import assert_same_tensors, state_of, tensors_of, trained_names
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
        [row] = [row for row in ROWS if row.name == name]
        model = get_peft_model(row.base(), HoulsbyConfig(**row.first)).eval()
        perturb(model)
        whole = output(model, row)
        with houlsby_peft.ablate(model, [1], keep_norms):
            ablated = output(model, row)
        assert torch.equal(output(model, row), whole)
        houlsby_peft.prune(model, [1], "small", keep_norms=keep_norms)
        assert torch.equal(output(model, row), whole)
        model.save_pretrained(tmp_path, selected_adapters=["small"])
        loaded = PeftModel.from_pretrained(row.base(), tmp_path / "small").eval()
        assert torch.equal(output(loaded, row), ablated)
        for name, module in loaded.named_modules():
            assert not (isinstance(module, HoulsbyLayer) and in_layer_1(name))
        # By hand: without the wrappers in the module tree.
        wrappers = (HoulsbyLayer,) if keep_norms else (HoulsbyLayer, HoulsbyLayerNorm)
        for name, module in list(model.named_modules()):
            if isinstance(module, wrappers) and in_layer_1(name):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, module.base_layer)
        assert torch.equal(output(model, row), ablated)
        assert not torch.allclose(ablated, whole, atol=1e-3)

    def test_ablated_blocks_nest_and_end_after_an_error_and_keep_disabled_adapters_disabled(
        self, token_ids
    ):
        model = adapted()
        whole = logits(model, token_ids)
        with houlsby_peft.ablate(model, [0, 1]):
            without_two = logits(model, token_ids)
        with houlsby_peft.ablate(model, [1]):
            without_one = logits(model, token_ids)
            with suppress(KeyError), houlsby_peft.ablate(model, [0, 1]):
                assert torch.equal(logits(model, token_ids), without_two)
                raise KeyError
            assert torch.equal(logits(model, token_ids), without_one)
        with model.disable_adapter():
            base = logits(model, token_ids)
            with houlsby_peft.ablate(model, [0], keep_norms=False):
                assert torch.equal(logits(model, token_ids), base)
        assert torch.equal(logits(model, token_ids), whole)

    def test_other_layers_still_train_and_every_wrapper_is_accepted(self, token_ids):
        model = adapted()
        injected = inject_adapter_in_model(HoulsbyConfig(r=4), tiny_bert(), "one").eval()
        injected.load_state_dict(model.get_base_model().state_dict())
        names = trained_names(model)
        with houlsby_peft.ablate(model, [0, 2], keep_norms=False):
            model(input_ids=token_ids).logits.sum().backward()
            expected = logits(model, token_ids)
        assert trained_names(model) == names
        for name in names:
            is_bypassed = re.search(r"layer\.[02]\.", name) is not None
            assert (model.get_parameter(name).grad is None) == is_bypassed, name
        for wrapper in (model.base_model, model.get_base_model(), injected):
            with houlsby_peft.ablate(wrapper, [0, 2], keep_norms=False):
                assert torch.equal(logits(wrapper, token_ids), expected)

    def test_adapter_drop_skips_a_random_number_of_the_lowest_layers_in_each_step(
        self, token_ids, tmp_path
    ):
        model, steps = adapted(layers_to_transform=[0, 1, 2]), []
        rows = [{"input_ids": ids, "labels": torch.tensor(1)} for ids in token_ids]

        class Layers(TrainerCallback):
            """Collects the layers that each step trains."""

            def on_pre_optimizer_step(self, args, state, control, **kwargs):
                layers = set()
                for name, weight in model.named_parameters():
                    layer = re.search(r"\.layer\.(\d)\.", name)
                    if layer and weight.grad is not None:
                        layers.add(int(layer[1]))
                steps.append(layers)

        def train(**options):
            args = TrainingArguments(
                tmp_path, seed=3, max_steps=12, per_device_train_batch_size=2, use_cpu=True,
                report_to="none", disable_tqdm=True, save_steps=6, learning_rate=1e-2,
            )  # fmt: skip
            callbacks = [houlsby_peft.AdapterDrop(), Layers()]
            trainer = Trainer(model, args, train_dataset=rows, callbacks=callbacks)
            trainer.train(**options)
            return trainer

        trainer = train()
        assert {tuple(layers) for layers in steps} == {(2,), (1, 2), (0, 1, 2)}
        predictions = torch.tensor(trainer.predict(rows).predictions)
        torch.testing.assert_close(predictions, logits(model, token_ids), atol=1e-5, rtol=1e-5)
        train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
        assert steps[12:] == steps[6:12]
        # An interrupt within a step leaves all layers in use.
        whole, state = logits(model.eval(), token_ids), TrainerState(global_step=steps.index({2}))
        houlsby_peft.AdapterDrop().on_step_begin(trainer.args, state, None, model=model)
        assert torch.equal(logits(model, token_ids), whole)

    def test_rows_of_a_mixed_batch_are_bypassed_as_well(self, token_ids):
        model = two_adapters(two={"layers_to_transform": [2]})
        names = ["one", "two", "__base__", "two", "one"]
        with houlsby_peft.ablate(model, [2]), torch.no_grad():
            mixed = model(input_ids=token_ids, adapter_names=names).logits
            for name in ("one", "two"):
                model.set_adapter(name)
                rows = [row for row, name_of_row in enumerate(names) if name_of_row == name]
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
        dtypes = [weight.dtype for weight in tensors_of(model, "one").values()]
        assert {weight.dtype for weight in tensors_of(model, "smaller").values()} == {*dtypes}
        model.set_adapter("smaller")
        assert torch.equal(logits(model, token_ids), expected)

    @pytest.mark.parametrize("layers", [[1], [-1], [2, 9]], ids=str)
    def test_layers_without_an_adapter_are_refused(self, layers):
        with pytest.raises(ValueError, match=r"here \[2, 3\]"):
            houlsby_peft.ablate(adapted(layers_to_transform=[2, 3]), layers).__enter__()

    def test_a_model_without_an_adapter_is_refused(self):
        with pytest.raises(ValueError, match="here none"):
            houlsby_peft.ablate(tiny_bert(), [0]).__enter__()

    @pytest.mark.parametrize(
        ("layers", "name", "source", "word"),
        [
            ([2], "one", "one", "unused"),
            ([2], "small", "unknown", "unknown"),
            ([2, 3], "small", "one", "some layer"),
        ],
    )
    @pytest.mark.parametrize("keep_norms", [True, False])
    def test_what_cannot_be_pruned_is_refused(self, layers, name, source, word, keep_norms):
        model = adapted(layers_to_transform=[2, 3])
        with pytest.raises((ValueError, KeyError), match=word):
            houlsby_peft.prune(model, layers, name, source, keep_norms)

    def test_nothing_is_left_of_an_adapter_that_cannot_be_filled(self):
        model = adapted()
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
        model = two_adapters(one, two)
        model.base_model.add_weighted_adapter(["one", "two"], [0.25, 0.75], "mean")
        of_one, of_two = tensors_of(model, "one"), tensors_of(model, "two")
        mean = tensors_of(model, "mean")
        assert mean.keys() == of_one.keys() == of_two.keys()
        for key, tensor in mean.items():
            expected = 0.25 * of_one[key] + 0.75 * of_two[key]
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-5)
        model.set_adapter("mean")
        model.save_pretrained(tmp_path, selected_adapters=["mean"])
        loaded = PeftModel.from_pretrained(tiny_bert(), tmp_path / "mean").eval()
        torch.testing.assert_close(
            logits(loaded, token_ids), logits(model, token_ids), atol=1e-6, rtol=1e-6
        )

    @pytest.mark.parametrize("autocast", [True, False])
    def test_an_average_keeps_the_dtype_and_is_summed_in_float32(self, autocast):
        model = two_adapters(dtype=torch.bfloat16, autocast=autocast)
        # In bfloat16 the sum of the first two terms would round the second one away.
        model.base_model.add_weighted_adapter(["one", "two", "one"], [1e4, 1.0, -1e4], "mean")
        mean = tensors_of(model, "mean")
        for key, tensor in tensors_of(model, "two").items():
            assert mean[key].dtype == tensor.dtype
            torch.testing.assert_close(mean[key].float(), tensor.float(), atol=2e-3, rtol=1e-2)

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
        ("one", "two", "weights", "word"),
        [
            ({}, {"r": 3}, [1, 1], "r is"),
            ({"share_layers": 3}, {"share_layers": 1}, [1, 1], "share_layers"),
            (
                {"train_layer_norm": False},
                {"train_layer_norm": False, "layers_to_transform": [0, 1, 2]},
                [1, 1],
                r"layer\.3",
            ),
            (
                {"share_layers": 3, "layers_to_transform": [0, 1]},
                {"share_layers": 3},
                [1, 1],
                "two",
            ),
            ({"train_layer_norm": False}, {}, [1, 1], "LayerNorm"),
            ({"modules_to_save": []}, {}, [1, 1], "classifier"),
            ({"id2label": {0: "a"}}, {}, [1, 1], "classifier"),
            ({"positions": ["feed_forward"]}, {"kind": "pfeiffer"}, [1, 1], "kind"),
            ({"activation": "relu"}, {}, [1, 1], "activation"),
            ({"scaling": "learned"}, {}, [1, 1], "scaling"),
            ({}, {}, [float("nan"), 1], "finite"),
            # The mean of the rows of two classes would be called one of them.
            (
                {"id2label": {0: "bad", 1: "good"}},
                {"id2label": {0: "good", 1: "bad"}},
                [1, 1],
                "classes",
            ),
        ],
        ids=str,
    )
    def test_what_cannot_be_combined_is_refused(self, one, two, weights, word):
        model = two_adapters(one, two)
        untouched = state_of(model)
        with pytest.raises(ValueError, match=word):
            model.base_model.add_weighted_adapter(["one", "two"], weights, "both")
        assert state_of(model) == untouched

    @pytest.mark.parametrize(
        ("adapters", "name", "weight", "word"),
        [
            (["one", "two"], "both", 1e6, "float16"),  # which cannot hold them
            (["one", "three"], "mean", 1, "'three'.*one, two"),
            (["one"], "mean", 1, "2 weights"),
            (["one", "two"], "two", 1, "unused"),
        ],
    )
    def test_what_half_precision_cannot_hold_and_unknown_names_are_refused(
        self, adapters, name, weight, word
    ):
        model = two_adapters(dtype=torch.float16, autocast=False)
        untouched = state_of(model)
        with pytest.raises(ValueError, match=word):
            model.base_model.add_weighted_adapter(adapters, [weight, 1.0], name)
        assert state_of(model) == untouched


class TestInitialized:
    """`init_from`."""

    @pytest.mark.parametrize(
        ("name", "options", "bottlenecks"),
        [
            ("one", {}, 8),
            ("second", {"share_layers": 3}, 2),
            ("one", {"train_layer_norm": "all", "layers_to_transform": [1, 3]}, 4),
            ("one", {"rank_pattern": {"layer.1.output.dropout": 2}}, 8),
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("ignore:You have passed exclude_modules")
    def test_bottlenecks_and_norms_are_the_saved_ones_and_the_head_is_not(
        self, name, options, bottlenecks, tmp_path
    ):
        """The source may have another head, exclude what only its model has, and name places in
        another way.
        """
        config = HoulsbyConfig(r=4, exclude_modules=["cls.LayerNorm"], **options)
        config.rank_pattern = {f"encoder.{key}": r for key, r in config.rank_pattern.items()}
        source = get_peft_model(tiny_bert(num_labels=5), config, "one")
        perturb(source, seed=5)
        source.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "one" / "adapter_model.safetensors")
        model = adapted(**options)
        model.add_adapter("second", HoulsbyConfig(r=4, **options))
        expected, beside = tensors_of(model, name), {"one": "second", "second": "one"}[name]
        untouched = tensors_of(model, beside)
        houlsby_peft.init_from(model, tmp_path / "one", name)
        expected |= {key: saved[key] for key in expected if ".houlsby_" in key}
        assert sum(key.endswith("down_proj.weight") for key in expected) == bottlenecks
        assert_same_tensors(tensors_of(model, name), expected)
        assert_same_tensors(tensors_of(model, beside), untouched)

    @pytest.mark.parametrize(
        ("saved", "options", "word"),
        [
            ({}, {"r": 8}, "r is"),
            ({}, {"activation": "relu"}, "activation"),
            ({}, {"layers_to_transform": [0]}, "layers_to_transform"),
            ({}, {"exclude_modules": ["layer.0.output.dropout"]}, "no place"),
            ({}, {"rank_pattern": {"layer.0.output.dropout": 2}}, "shape"),
            # The file holds the owner's weights alone, whichever places are left out.
            (
                {
                    "share_layers": 4,
                    "exclude_modules": ["layer.1.output.dropout"],
                    "train_layer_norm": False,
                },
                {"share_layers": 4, "train_layer_norm": False},
                r"layer\.1\.output\.dropout",
            ),
        ],
        ids=str,
    )
    def test_another_adapter_is_refused_and_nothing_changes(self, saved, options, word, tmp_path):
        adapted(**saved).save_pretrained(tmp_path)
        self.assert_refused(tmp_path / "one", word, **options)

    def test_another_base_is_refused(self, tmp_path):
        get_peft_model(tiny_bert(seed=1), HoulsbyConfig(r=4)).save_pretrained(tmp_path)
        self.assert_refused(tmp_path, "same base model")

    def test_a_ladder_on_another_adapter_is_refused(self, tmp_path):
        adapted(seed=1).save_pretrained(tmp_path / "first")
        adapted(seed=2).save_pretrained(tmp_path / "second")
        of_first, of_second = (
            {"kind": "ladder", "beneath": str(tmp_path / name / "one")}
            for name in ("first", "second")
        )
        adapted(**of_first).save_pretrained(tmp_path)
        self.assert_refused(tmp_path / "one", "lie beneath", **of_second)

    def test_another_method_is_refused(self, tmp_path):
        get_peft_model(tiny_bert(), LoraConfig(target_modules=["query"])).save_pretrained(tmp_path)
        self.assert_refused(tmp_path, "HOULSBY")

    def assert_refused(self, folder, word, **options):
        model = adapted(**options)
        untouched = state_of(model)
        with pytest.raises((AdapterError, ValueError), match=word):
            houlsby_peft.init_from(model, folder, "one")
        assert state_of(model) == untouched
