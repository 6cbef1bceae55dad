"""What users of PEFT expect of an adapter, for every row of a table of models and configurations.

Nearly everything is compared with `reference`, which applies the tensors of an adapter's file to
the base model by written-out formulas, so that a mistake in adding, sharing, naming, saving or
choosing adapters shows.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from peft import (
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file

from contract_models import FILE_PREFIX, ROWS, Row, output, output_with_gradient, reference
from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.heads.head import HoulsbyHead
from model_states import assert_same_tensors, tensors_of, trained_names
from tiny_models import perturb_adapter


every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
FIRST, SECOND, BASE = "first", "second", "__base__"


def with_two_adapters(row: Row, dtype: torch.dtype = torch.float32) -> PeftModel:
    """A model whose first adapter is active; both are far from the base model."""
    base = row.base().to(dtype)
    model = get_peft_model(base, HoulsbyConfig(**row.first), adapter_name=FIRST).eval()
    model.add_adapter(SECOND, HoulsbyConfig(**row.second))
    perturb_adapter(model, FIRST, seed=1)
    perturb_adapter(model, SECOND, seed=2)
    return model


def expected_with(model, row, *names, dtype=torch.float32):
    fields = {FIRST: row.first, SECOND: row.second}
    adapters = [(tensors_of(model, name), fields[name]) for name in names]
    return reference(row, adapters, dtype)


def assert_close(result, expected):
    torch.testing.assert_close(result, expected, **TOLERANCE)


@every_row
def test_an_adapter_does_what_its_file_says(row):
    model = with_two_adapters(row)
    base = output(row.base(), row)
    for name in (FIRST, SECOND):
        model.set_adapter(name)
        assert_close(output(model, row), expected_with(model, row, name))
        assert (output(model, row) - base).abs().max() > 1e-2, "else nothing could be told"


@every_row
def test_disabled_adapters_leave_the_base_model_bit_for_bit(row):
    model, base = with_two_adapters(row), output(row.base(), row)
    with model.disable_adapter():
        assert torch.equal(output(model, row), base)
        with model.disable_adapter():
            assert torch.equal(output(model, row), base)
        assert torch.equal(output(model, row, adapter_names=[FIRST] * 6), base)
    assert_close(output(model, row), expected_with(model, row, FIRST))
    model.base_model.disable_adapter_layers()
    assert torch.equal(output(model, row), base)
    model.base_model.enable_adapter_layers()
    assert_close(output(model, row), expected_with(model, row, FIRST))
    model.base_model.set_adapter([])
    assert torch.equal(output(model, row), base)


@every_row
def test_unloading_gives_the_base_model_back_bit_for_bit(row):
    base, unloaded = row.base(), with_two_adapters(row).unload()
    modules = {name: type(module) for name, module in unloaded.named_modules()}
    assert modules == {name: type(module) for name, module in base.named_modules()}
    assert_same_tensors(unloaded.state_dict(), base.state_dict())
    assert torch.equal(output(unloaded, row), output(base, row))


@every_row
def test_several_active_adapters_run_one_after_the_other(row):
    model = with_two_adapters(row)
    for names in ([FIRST, SECOND], [SECOND, FIRST]):
        model.base_model.set_adapter(names)
        assert model.active_adapters == names
        assert_close(output(model, row), expected_with(model, row, *names))


@every_row
def test_rows_of_different_adapters_equal_the_rows_one_by_one(row):
    model = with_two_adapters(row)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    alone = {"b": output(row.base(), row)}
    names_of_letters = {"f": FIRST, "s": SECOND, "b": BASE}
    for letter in "fs":
        model.set_adapter(names_of_letters[letter])
        alone[letter] = output(model, row)
    # Interleaved, in blocks, unevenly, of one only; each twice, as the second time it is known
    # where the rows are.
    for letters in ("fsbfsb", "ffssbb", "bfffsf", "bsffsf", "ffffff", "ssssss", "bbbbbb"):
        names = [names_of_letters[letter] for letter in letters]
        expected = torch.stack([alone[letter][index] for index, letter in enumerate(letters)])
        for _ in range(2):
            assert_close(output(model, row, adapter_names=names), expected)
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


@every_row
def test_an_average_is_the_average_of_the_files_by_hand(row):
    model = with_two_adapters(replace(row, second=row.first))
    model.add_weighted_adapter([FIRST, SECOND], [1.5, -0.25], "mean")
    of_first, of_second = tensors_of(model, FIRST), tensors_of(model, SECOND)
    mean = tensors_of(model, "mean")
    assert mean.keys() == of_first.keys()
    for key, tensor in mean.items():
        assert_close(tensor, 1.5 * of_first[key] - 0.25 * of_second[key])
    assert model.active_adapters == [FIRST]
    model.set_adapter("mean")
    assert_close(output(model, row), reference(row, [(mean, row.first)]))


@every_row
def test_a_saved_file_has_each_tensor_of_the_adapter_once_and_not_its_name(row, tmp_path):
    model = with_two_adapters(row)
    model.save_pretrained(tmp_path, selected_adapters=[SECOND])
    assert [path.name for path in tmp_path.iterdir()] == [SECOND]
    # It would make transformers look for the base model's weights in the folder.
    assert not (tmp_path / SECOND / "config.json").exists()
    saved = load_file(tmp_path / SECOND / "adapter_model.safetensors")
    assert not any(SECOND in key for key in saved)
    size = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        size += tensor.numel() if f".{SECOND}." in name else 0
    assert sum(tensor.numel() for tensor in saved.values()) == size


@every_row
def test_saved_adapters_load_as_they_were(row, tmp_path):
    model = with_two_adapters(row)
    model.save_pretrained(tmp_path)
    tensors, expected = tensors_of(model, FIRST), output(model, row)
    names = {name.replace(f".{FIRST}.", ".default.") for name in trained_names(model)}
    for folder, options in (
        (tmp_path / FIRST, {"adapter_name": "renamed"}),
        (tmp_path, {"subfolder": FIRST}),
        (tmp_path / FIRST, {"low_cpu_mem_usage": True}),
    ):
        loaded = PeftModel.from_pretrained(row.base(), folder, **options)
        assert_same_tensors(tensors_of(loaded, loaded.active_adapters[0]), tensors)
        # Not to the last bit: some processors' convolutions depend on where in memory their inputs
        # are.
        torch.testing.assert_close(output(loaded, row), expected, atol=1e-6, rtol=1e-6)
        assert not trained_names(loaded)
    loaded = PeftModel.from_pretrained(row.base(), tmp_path / FIRST, is_trainable=True)
    assert trained_names(loaded) == names


@every_row
def test_adapters_are_loaded_into_a_running_model_and_over_one_that_is_there(row, tmp_path):
    model = with_two_adapters(row)
    model.save_pretrained(tmp_path)
    expected = output(model, row)
    model.load_adapter(tmp_path / FIRST, "third")
    model.set_adapter("third")
    assert torch.equal(output(model, row), expected)
    perturb_adapter(model, "third", seed=3)
    assert not torch.equal(output(model, row), expected)
    model.load_adapter(tmp_path / FIRST, "third")
    assert torch.equal(output(model, row), expected)


@every_row
def test_injected_adapters_give_and_take_the_same_tensors(row):
    source, weights = with_two_adapters(row), {}
    for key, tensor in tensors_of(source, FIRST).items():
        weights[key.removeprefix(FILE_PREFIX)] = tensor
    for state_dict in (None, weights):
        config = HoulsbyConfig(**row.first)
        model = inject_adapter_in_model(config, row.base(), "mine", state_dict=state_dict)
        set_peft_model_state_dict(model, weights, adapter_name="mine")
        assert torch.equal(output(model.eval(), row), output(source, row))
        assert_same_tensors(get_peft_model_state_dict(model, adapter_name="mine"), weights)


@every_row
@pytest.mark.filterwarnings("ignore:Adapter second was active which is now deleted")
def test_deleting_leaves_no_trace_in_the_model_and_in_an_adapter_of_the_same_name(row):
    model = with_two_adapters(row)
    model.set_adapter(SECOND)
    of_first, of_second = expected_with(model, row, FIRST), output(model, row)
    model.delete_adapter(FIRST)
    assert torch.equal(output(model, row), of_second)
    assert not any(f".{FIRST}." in name for name in model.state_dict())
    model.add_adapter(FIRST, HoulsbyConfig(**row.second))
    perturb_adapter(model, FIRST, seed=5)
    added = reference(row, [(tensors_of(model, FIRST), row.second)])
    assert not torch.allclose(added, of_first, **TOLERANCE)
    mixed = output(model, row, adapter_names=[FIRST, SECOND] * 3)
    assert_close(mixed[::2], added[::2])
    model.delete_adapter(SECOND)
    assert model.active_adapters == [FIRST]
    assert_close(output(model, row), added)


@every_row
def test_weights_that_change_count_in_the_next_mixed_batch(row):
    model, names = with_two_adapters(row), [SECOND, FIRST, BASE] * 2
    first_batch = output(model, row, adapter_names=names)
    perturb_adapter(model, FIRST, seed=6)
    changed = {key: value + 0.1 for key, value in tensors_of(model, SECOND).items()}
    set_peft_model_state_dict(model, changed, adapter_name=SECOND)
    mixed = output(model, row, adapter_names=names)
    assert_close(mixed[0::3], expected_with(model, row, SECOND)[0::3])
    assert_close(mixed[1::3], expected_with(model, row, FIRST)[1::3])
    assert_close(mixed[2::3], first_batch[2::3])
    assert not torch.allclose(mixed, first_batch, **TOLERANCE)


@every_row
def test_the_reported_status_is_the_models(row):
    model = with_two_adapters(row)
    status = model.get_model_status()
    assert status.adapter_model_type == "HoulsbyModel"
    # PEFT says so where an adapter that is not active trains a module that the active one leaves
    # alone.
    active = "irregular" if "modules_to_save" in row.second else [FIRST]
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (True, active, [])
    assert status.available_adapters == [FIRST, SECOND]
    assert status.requires_grad == {FIRST: True, SECOND: False}
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    size = sum(sizes[name] for name in sizes if f".{FIRST}." in name)
    assert model.get_nb_trainable_parameters() == (size, sum(sizes.values()))
    with model.disable_adapter():
        assert model.get_model_status().enabled is False


@every_row
def test_each_layer_reports_the_adapters_that_it_has(row):
    model = with_two_adapters(row)
    kinds = (HoulsbyLayer, HoulsbyLayerNorm, HoulsbyHead)
    layers = model.get_layer_status()
    assert len(layers) == sum(isinstance(part, kinds) for part in model.modules())
    for layer in layers:
        # A layer that uses the bottleneck of another one has the adapter as well.
        assert layer.available_adapters or layer.name.removeprefix("model.") not in row.places
        assert layer.active_adapters == [FIRST] or layer.available_adapters == [SECOND]


@every_row
def test_gradients_follow_the_active_adapter_and_can_be_set(row):
    model, weights = with_two_adapters(row), {FIRST: set(), SECOND: set()}
    for key, _ in model.named_parameters():
        for name in weights:
            if f".{name}." in key:
                weights[name].add(key)

    assert trained_names(model) == weights[FIRST]
    model.set_adapter(SECOND)
    assert trained_names(model) == weights[SECOND]
    model.set_adapter(FIRST, inference_mode=True)
    assert trained_names(model) == set()
    model.set_requires_grad([FIRST, SECOND])
    assert trained_names(model) == weights[FIRST] | weights[SECOND]
    model.set_requires_grad(FIRST, requires_grad=False)
    assert trained_names(model) == weights[SECOND]


@every_row
def test_copies_are_independent_and_equal(row):
    model, names = with_two_adapters(row), [FIRST, SECOND, BASE] * 2
    expected, mixed = output(model, row), output(model, row, adapter_names=names)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(copied, row), expected)
        assert torch.equal(output(copied, row, adapter_names=names), mixed)
        perturb_adapter(copied, FIRST, seed=4)
        assert_close(output(copied, row), expected_with(copied, row, FIRST))
        assert torch.equal(output(model, row), expected)


IN_HALF = [(ROWS[0], torch.float16), *((row, torch.bfloat16) for row in ROWS)]
every_half = pytest.mark.parametrize(
    ("row", "dtype"), IN_HALF, ids=lambda value: getattr(value, "name", str(value))
)


def with_inputs_in(row, dtype):
    inputs = dict(row.inputs)
    for key, value in inputs.items():
        if value.is_floating_point():
            inputs[key] = value.to(dtype)
    return replace(row, inputs=inputs)


def assert_near(result, expected):
    assert (result.float() - expected.float()).norm() < 0.03 * expected.float().norm()


@every_half
def test_a_base_in_half_precision_with_adapters_in_full(row, dtype):
    row, model = with_inputs_in(row, dtype), with_two_adapters(row, dtype)
    own_dtypes, head_dtypes = set(), set()
    for name, parameter in model.named_parameters():
        if ".houlsby_" in name:
            own_dtypes.add(parameter.dtype)
        elif f".modules_to_save.{FIRST}." in name:
            head_dtypes.add(parameter.dtype)
    assert own_dtypes == {torch.float32}
    assert head_dtypes <= {torch.float32}
    # In full precision with a head, as a loss needs it.
    assert output(model, row).dtype == (torch.float32 if head_dtypes else dtype)
    expected = expected_with(model, row, FIRST, dtype=dtype)
    assert_near(output(model, row), expected)
    mixed = output(model, row, adapter_names=[FIRST, SECOND] * 3)
    assert_near(mixed[::2], expected[::2])
    everything = model.to(dtype).eval()
    assert {parameter.dtype for parameter in everything.parameters()} == {dtype}
    assert_near(output(everything, row), expected)


@every_half
def test_adapters_on_a_base_in_half_precision_train(row, dtype):
    row, model = with_inputs_in(row, dtype), with_two_adapters(row, dtype).train()
    output_with_gradient(model, row).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        if f".{FIRST}." in name:
            assert parameter.grad.isfinite().all(), name
