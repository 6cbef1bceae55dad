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

from contract_models import (
    FILE_PREFIX,
    ROWS,
    Row,
    bert,
    ibert,
    output,
    output_with_gradient,
    reference,
)
from houlsby_peft import HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.heads.head import HoulsbyHead
from tiny_models import perturb_adapter


every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
FIRST, SECOND = "first", "second"


def with_two_adapters(row: Row) -> PeftModel:
    model = get_peft_model(row.base(), HoulsbyConfig(**row.first), adapter_name=FIRST).eval()
    model.add_adapter(SECOND, HoulsbyConfig(**row.second))
    perturb_adapter(model, FIRST, seed=1)
    perturb_adapter(model, SECOND, seed=2)
    return model


def file_of(model, adapter_name) -> dict[str, torch.Tensor]:
    return {
        key: value.clone()
        for key, value in get_peft_model_state_dict(model, adapter_name=adapter_name).items()
    }


def expected_with(model, row, *names):
    fields = {FIRST: row.first, SECOND: row.second}
    return reference(row, [(file_of(model, name), fields[name]) for name in names])


@every_row
def test_an_adapter_does_what_its_file_says(row):
    model = with_two_adapters(row)
    base = output(row.base(), row)
    for name in (FIRST, SECOND):
        model.set_adapter(name)
        torch.testing.assert_close(output(model, row), expected_with(model, row, name), **TOLERANCE)
        assert (output(model, row) - base).abs().max() > 1e-2, (
            "the adapter must change something for this to tell"
        )


@every_row
def test_disabled_and_unloaded_adapters_leave_the_base_model_bit_for_bit(row):
    model, expected = with_two_adapters(row), output(row.base(), row)
    with model.disable_adapter():
        assert torch.equal(output(model, row), expected)
        with model.disable_adapter():
            assert torch.equal(output(model, row), expected)
        assert torch.equal(output(model, row), expected)
        assert torch.equal(output(model, row, adapter_names=[FIRST] * 6), expected)
    torch.testing.assert_close(output(model, row), expected_with(model, row, FIRST), **TOLERANCE)
    model.base_model.disable_adapter_layers()
    assert torch.equal(output(model, row), expected)
    model.base_model.enable_adapter_layers()
    torch.testing.assert_close(output(model, row), expected_with(model, row, FIRST), **TOLERANCE)
    model.base_model.set_adapter([])
    assert torch.equal(output(model, row), expected)

    base = row.base()
    heads = {
        name
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, HoulsbyHead)
    }
    saved = {
        head for fields in (row.first, row.second) for head in fields.get("modules_to_save", [])
    }
    assert heads == saved | ({"classifier"} if row.build in (bert, ibert) else set())
    unloaded = model.unload()
    assert [(name, type(module)) for name, module in unloaded.named_modules()] == [
        (name, type(module)) for name, module in base.named_modules()
    ]
    weights = base.state_dict()
    assert unloaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in unloaded.state_dict().items())
    assert torch.equal(output(unloaded, row), expected)


@every_row
def test_several_active_adapters_run_one_after_the_other(row):
    model = with_two_adapters(row)
    for names in ([FIRST, SECOND], [SECOND, FIRST]):
        model.base_model.set_adapter(names)
        assert model.active_adapters == names
        torch.testing.assert_close(
            output(model, row), expected_with(model, row, *names), **TOLERANCE
        )


@every_row
def test_rows_of_different_adapters_equal_the_rows_one_by_one(row):
    model = with_two_adapters(row)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    base, alone = output(row.base(), row), {}
    for name in (FIRST, SECOND):
        model.set_adapter(name)
        alone[name] = output(model, row)
    # Interleaved, in blocks, unevenly, of one only; each twice, as the second time it is known
    # where the rows are.
    for order in ("fsb" * 2, "ffssbb", "bfffsf", "bsffsf", "ffffff", "ssssss", "bbbbbb"):
        names = [{"f": FIRST, "s": SECOND, "b": "__base__"}[letter] for letter in order]
        expected = torch.stack(
            [{**alone, "__base__": base}[name][i] for i, name in enumerate(names)]
        )
        for _ in range(2):
            torch.testing.assert_close(
                output(model, row, adapter_names=names), expected, **TOLERANCE
            )
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


@every_row
def test_an_average_is_the_average_of_the_files_by_hand(row):
    model = get_peft_model(row.base(), HoulsbyConfig(**row.first), adapter_name=FIRST).eval()
    model.add_adapter(SECOND, HoulsbyConfig(**row.first))
    perturb_adapter(model, FIRST, seed=1)
    perturb_adapter(model, SECOND, seed=2)
    model.add_weighted_adapter([FIRST, SECOND], [1.5, -0.25], "mean")
    one, two, mean = (file_of(model, name) for name in (FIRST, SECOND, "mean"))
    assert mean.keys() == one.keys()
    for key, tensor in mean.items():
        torch.testing.assert_close(tensor, 1.5 * one[key] - 0.25 * two[key], **TOLERANCE)
    assert model.active_adapters == [FIRST]
    model.set_adapter("mean")
    torch.testing.assert_close(output(model, row), reference(row, [(mean, row.first)]), **TOLERANCE)


@every_row
def test_saved_adapters_load_as_they_were(row, tmp_path):
    model = with_two_adapters(row)
    model.set_adapter(SECOND)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    expected, file = output(model, row), file_of(model, SECOND)
    model.save_pretrained(tmp_path, selected_adapters=[SECOND])
    assert [path.name for path in tmp_path.iterdir()] == [SECOND]
    # It would make transformers look for the base model's weights in the folder.
    assert not (tmp_path / SECOND / "config.json").exists()
    assert "A [Houlsby adapter]" in (tmp_path / SECOND / "README.md").read_text()
    # Each tensor once, without the adapter's name.
    saved = load_file(tmp_path / SECOND / "adapter_model.safetensors")
    assert not any(SECOND in key for key in saved)
    assert sum(tensor.numel() for tensor in saved.values()) == sum(
        tensor.numel()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if f".{SECOND}." in name
    )
    for loaded in (
        PeftModel.from_pretrained(row.base(), tmp_path / SECOND, adapter_name="renamed"),
        PeftModel.from_pretrained(row.base(), tmp_path, subfolder=SECOND),
        PeftModel.from_pretrained(row.base(), tmp_path / SECOND, low_cpu_mem_usage=True),
    ):
        found = file_of(loaded, loaded.active_adapters[0])
        assert found.keys() == file.keys() == saved.keys()
        assert all(torch.equal(found[key], file[key]) for key in file)
        # Not to the last bit: some processors' convolutions depend on where in memory their inputs
        # are.
        torch.testing.assert_close(output(loaded, row), expected, atol=1e-6, rtol=1e-6)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
    loaded = PeftModel.from_pretrained(row.base(), tmp_path / SECOND, is_trainable=True)
    found = {name for name, weight in loaded.named_parameters() if weight.requires_grad}
    assert found == {name.replace(f".{SECOND}.", ".default.") for name in trained}
    # Into a running model, and over an adapter that is there.
    model.load_adapter(tmp_path / SECOND, "third")
    model.set_adapter("third")
    assert torch.equal(output(model, row), expected)
    perturb_adapter(model, "third", seed=3)
    assert not torch.equal(output(model, row), expected)
    model.load_adapter(tmp_path / SECOND, "third")
    assert torch.equal(output(model, row), expected)


@every_row
def test_injected_adapters_give_and_take_the_same_tensors(row):
    source = with_two_adapters(row)
    weights = {
        key.removeprefix(FILE_PREFIX): value for key, value in file_of(source, FIRST).items()
    }
    for state_dict in (None, weights):
        model = inject_adapter_in_model(
            HoulsbyConfig(**row.first), row.base(), "mine", state_dict=state_dict
        )
        set_peft_model_state_dict(model, weights, adapter_name="mine")
        assert torch.equal(output(model.eval(), row), output(source, row))
        again = get_peft_model_state_dict(model, adapter_name="mine")
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[key], weights[key]) for key in weights)


@every_row
def test_deleting_leaves_the_others_as_they_were(row):
    model = with_two_adapters(row)
    model.set_adapter(SECOND)
    expected = {SECOND: output(model, row), FIRST: expected_with(model, row, FIRST)}
    model.delete_adapter(FIRST)
    assert torch.equal(output(model, row), expected[SECOND])
    assert not any(f".{FIRST}." in name for name in model.state_dict())
    # Another adapter under the same name: nothing of the old one may be left anywhere.
    model.add_adapter(FIRST, HoulsbyConfig(**row.second))
    perturb_adapter(model, FIRST, seed=5)
    now = reference(row, [(file_of(model, FIRST), row.second)])
    mixed = output(model, row, adapter_names=[FIRST, SECOND] * 3)
    torch.testing.assert_close(mixed[::2], now[::2], **TOLERANCE)
    assert not torch.allclose(now, expected[FIRST], **TOLERANCE)
    with pytest.warns(
        UserWarning,
        match=f"{SECOND} was active which is now deleted. Setting active adapter to {FIRST}",
    ):
        model.delete_adapter(SECOND)
    assert model.active_adapters == [FIRST]
    torch.testing.assert_close(output(model, row), now, **TOLERANCE)
    with pytest.raises(ValueError, match="does not exist"):
        model.delete_adapter("unknown")


@every_row
def test_weights_that_change_count_in_the_next_mixed_batch(row):
    model, names = with_two_adapters(row), [SECOND, FIRST, "__base__"] * 2
    before = output(model, row, adapter_names=names)
    perturb_adapter(model, FIRST, seed=6)
    changed = {key: value + 0.1 for key, value in file_of(model, SECOND).items()}
    set_peft_model_state_dict(model, changed, adapter_name=SECOND)
    mixed = output(model, row, adapter_names=names)
    torch.testing.assert_close(mixed[0::3], expected_with(model, row, SECOND)[0::3], **TOLERANCE)
    torch.testing.assert_close(mixed[1::3], expected_with(model, row, FIRST)[1::3], **TOLERANCE)
    torch.testing.assert_close(mixed[2::3], before[2::3], **TOLERANCE)
    assert not torch.allclose(mixed, before, **TOLERANCE)


@every_row
def test_the_reported_status_is_the_models(row):
    model = with_two_adapters(row)
    layers = [
        m for m in model.modules() if isinstance(m, (HoulsbyLayer, HoulsbyLayerNorm, HoulsbyHead))
    ]
    # PEFT says so where an adapter that is not active trains a module that the active one leaves
    # alone.
    active = "irregular" if "modules_to_save" in row.second else [FIRST]
    status = model.get_model_status()
    assert (status.adapter_model_type, status.num_adapter_layers) == ("HoulsbyModel", len(layers))
    assert (status.enabled, status.active_adapters, status.merged_adapters) == (True, active, [])
    assert status.available_adapters == [FIRST, SECOND]
    assert status.peft_types == {FIRST: "HOULSBY", SECOND: "HOULSBY"}
    assert status.requires_grad == {FIRST: True, SECOND: False}
    size = sum(weight.numel() for name, weight in model.named_parameters() if f".{FIRST}." in name)
    assert status.trainable_params == size
    assert model.get_nb_trainable_parameters() == (size, sum(p.numel() for p in model.parameters()))
    for layer in model.get_layer_status():
        # A layer that uses the bottleneck of another one has the adapter as well.
        assert layer.available_adapters or layer.name.removeprefix("model.") not in row.places
        assert layer.active_adapters == [FIRST] or layer.available_adapters == [SECOND]
    with model.disable_adapter():
        assert model.get_model_status().enabled is False


@every_row
def test_gradients_follow_the_active_adapter_and_can_be_set(row):
    model = with_two_adapters(row)

    def trained():
        found = {name: [] for name in (FIRST, SECOND)}
        for key, parameter in model.named_parameters():
            owner = next((name for name in found if f".{name}." in key), None)
            if owner:
                found[owner].append(parameter.requires_grad)
            else:
                assert not parameter.requires_grad, key
        return {
            name: all(flags) if any(flags) == all(flags) else "some"
            for name, flags in found.items()
        }

    assert trained() == {FIRST: True, SECOND: False}
    model.set_adapter(SECOND)
    assert trained() == {FIRST: False, SECOND: True}
    model.set_adapter(FIRST, inference_mode=True)
    assert trained() == {FIRST: False, SECOND: False}
    model.set_requires_grad([FIRST, SECOND])
    assert trained() == {FIRST: True, SECOND: True}
    model.set_requires_grad(FIRST, requires_grad=False)
    assert trained() == {FIRST: False, SECOND: True}


@every_row
def test_copies_are_independent_and_equal(row):
    model, names = with_two_adapters(row), [FIRST, SECOND, "__base__"] * 2
    expected, mixed = output(model, row), output(model, row, adapter_names=names)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(copied, row), expected)
        assert torch.equal(output(copied, row, adapter_names=names), mixed)
        perturb_adapter(copied, FIRST, seed=4)
        torch.testing.assert_close(
            output(copied, row), expected_with(copied, row, FIRST), **TOLERANCE
        )
        assert torch.equal(output(model, row), expected)


@pytest.mark.parametrize(
    ("row", "dtype"),
    [(ROWS[0], torch.float16), *((row, torch.bfloat16) for row in ROWS)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_base_in_half_precision_with_adapters_in_full(row, dtype):
    model = get_peft_model(
        row.base().to(dtype), HoulsbyConfig(**row.first), adapter_name=FIRST
    ).eval()
    model.add_adapter(SECOND, HoulsbyConfig(**row.second))
    assert {p.dtype for name, p in model.named_parameters() if ".houlsby_" in name} == {
        torch.float32
    }
    perturb_adapter(model, FIRST, seed=1)
    perturb_adapter(model, SECOND, seed=2)
    inputs = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in row.inputs.items()
    }
    row = replace(row, inputs=inputs)
    expected = reference(row, [(file_of(model, FIRST), row.first)], dtype)
    heads = {
        p.dtype for name, p in model.named_parameters() if f".modules_to_save.{FIRST}." in name
    }
    assert heads <= {torch.float32}
    assert output(model, row).dtype == (torch.float32 if heads else dtype)  # as a loss needs it
    assert distance(output(model, row), expected) < 0.03
    assert (
        distance(output(model, row, adapter_names=[FIRST, SECOND] * 3)[::2], expected[::2]) < 0.03
    )
    model.train()
    output_with_gradient(model, row).float().square().mean().backward()
    own = [p for name, p in model.named_parameters() if f".{FIRST}." in name]
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in own)
    everything = model.to(dtype).eval()
    assert {parameter.dtype for parameter in everything.parameters()} == {dtype}
    assert distance(output(everything, row), expected) < 0.03


def distance(a, b):
    return (a.float() - b.float()).norm() / b.float().norm()
