"""Every architecture of the table, against its own code in transformers; the rows are in `architecture_rows.py`."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from transformers.models.auto import modeling_auto

from architecture_rows import ROWS
from houlsby_peft import AdapterError, HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.invertible import HoulsbyEmbedding
from houlsby_peft.layer import base_modules
from houlsby_peft.placement.architectures import ARCHITECTURES
from houlsby_peft.placement.place import full_name
from houlsby_peft.placement.places import find_layers
from houlsby_peft.placement.skips import EMBEDDINGS, SKIPS
from tiny_models import perturb


EVERY_POSITION = ("attention", "feed_forward", "cross_attention")
OUTPUTS = (("text_embeds", "image_embeds"), ("last_hidden_state",), ("logits",))
# What maps embeddings that are narrower than the layers.
FROM_NARROW_EMBEDDINGS = {
    "albert": "encoder.embedding_hidden_mapping_in",
    "electra": "embeddings_project",
    "rembert": "encoder.embedding_hidden_mapping_in",
}
NOT_CHECKPOINTED = ("adapter.layers", "speech_encoder.adapter.layers")
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def adapted(row, model=None, **options):
    """The row's model with a trained adapter, in eval mode."""
    torch.manual_seed(0)
    config = HoulsbyConfig(**{"r": 4, "positions": EVERY_POSITION, "init_weights": False, **options})
    model = get_peft_model(row.model() if model is None else model, config)
    perturb(model)
    return model.eval()


def outputs(model, batch):
    """What a model computes, as one tensor per row of the batch."""
    with torch.no_grad():
        result = model(**batch)
    names = next(names for names in OUTPUTS if names[0] in result)
    rows = len(next(iter(batch.values())))
    return torch.cat([result[name].reshape(rows, -1) for name in names], dim=1)


def gradients(model, batch):
    """Gradients of a training step by the name of the trainable weight, always with the same dropout."""
    torch.manual_seed(0)
    result = model.train()(**batch)
    sum(value.pow(2).sum() for value in result.values() if torch.is_tensor(value)).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def test_every_architecture_is_tested():
    assert {name.partition(":")[0] for name in ROWS} == set(ARCHITECTURES)


@every_row
def test_numbers_of_places_and_norms(row):
    base = row.model()
    expected = sum(len(ends) for *_, ends in row.layers(base))
    crossing = sum("cross_attention" in ends for *_, ends in row.layers(base))
    config = HoulsbyConfig(r=4)
    model = get_peft_model(base, config)
    assert sum(isinstance(module, HoulsbyLayer) for module in model.modules()) == expected - crossing
    assert sum(isinstance(module, HoulsbyLayerNorm) for module in model.modules()) == row.norms
    model.add_adapter("every position", HoulsbyConfig(r=4, positions=EVERY_POSITION))
    assert sum(isinstance(module, HoulsbyLayer) for module in model.modules()) == expected
    assert sum(isinstance(module, HoulsbyLayerNorm) for module in model.modules()) == row.norms


@every_row
def test_output_and_gradients(row):
    # Frozen as PEFT freezes it, because PyTorch may choose other kernels for weights without a gradient.
    base = row.model().requires_grad_(False)
    before = outputs(base, row.batch())
    model = adapted(row, base)
    assert not torch.allclose(outputs(model, row.batch()), before, atol=1e-3)
    with model.disable_adapter():
        torch.testing.assert_close(outputs(model, row.batch()), before, rtol=0, atol=0)
    trained = gradients(model, row.batch())
    assert all("houlsby_" in name for name in trained)
    assert [name for name, gradient in trained.items() if gradient is None or not gradient.any()] == []


@every_row
def test_saved_and_loaded(row, tmp_path):
    model = adapted(row)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(row.model(), tmp_path).eval()
    torch.testing.assert_close(outputs(loaded, row.batch()), outputs(model, row.batch()), rtol=0, atol=0)


# Newer versions of transformers have another name for it, the oldest supported one has not.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.* is deprecated:FutureWarning")
@every_row
def test_gradient_checkpointing(row):
    # Gemma 4's audio encoder claims to support it, but has no module that does.
    supported = any(hasattr(module, "gradient_checkpointing") for module in row.model().modules())
    assert (row.model().supports_gradient_checkpointing and supported) == bool(row.checkpointing)
    plain = gradients(adapted(row), row.batch())
    for use_reentrant in row.checkpointing:
        base = row.model()
        base.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model = adapted(row, base)
        calls: list[str] = []
        for name, layer, ends in row.layers(base):
            if not ends or name.startswith(NOT_CHECKPOINTED):
                continue
            inner = layer.get_submodule(next(iter(ends.values())))
            inner.register_forward_pre_hook(lambda *_, name=name, calls=calls: calls.append(name))
        for weight, gradient in gradients(model, row.batch()).items():
            atol = 1e-5 * max(1, float(plain[weight].abs().max()))
            torch.testing.assert_close(gradient, plain[weight], rtol=1e-4, atol=atol)
        # What is in a layer runs again for its backward pass.
        assert set(Counter(calls).values()) == {2}


class Recorder:
    """Records, at every call of a module, its first input, its second one if it is a tensor, and its output."""

    def __init__(self, module):
        self.inputs, self.outputs, self.reads = [], [], []
        module.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs, output):
        # Copies, because some layers go on to change their tensors in place.
        self.inputs.append((args[0] if args else kwargs["hidden_states"]).detach().clone())
        self.reads += [value.detach().clone() for value in args[1:2] if torch.is_tensor(value)]
        self.outputs.append((output[0] if isinstance(output, tuple) else output).detach().clone())


class LayerRecorder(Recorder):
    """Records a layer; one without a module of its own, from the input of its first part to its last part's output."""

    def __init__(self, layer):
        if not isinstance(layer, torch.nn.ModuleDict):
            super().__init__(layer)
            return
        first, *_, last = map(Recorder, layer.values())
        self.inputs, self.outputs = first.inputs, last.outputs


def record(row, model):
    """Run a batch; for each layer, what it, its projections by position, and its bottlenecks saw and gave."""
    recorders = []
    for name, layer, ends in row.layers(model.get_base_model()):
        projections = {}
        for position, end in ends.items():
            projection = layer.get_submodule(end)
            projections[position] = Recorder(getattr(projection, "base_layer", projection))
        adapters = [module for module in layer.modules() if isinstance(module, HoulsbyLayer)]
        bottlenecks = [Recorder(each) for adapter in adapters if (each := adapter.bottleneck("default")) is not None]
        recorders.append((name, layer, LayerRecorder(layer), projections, bottlenecks))
    model(**row.batch())
    return recorders


def meet_skip(row, layer, hidden, branches):
    """The output of a layer, written out from its input and what the adapters of its sub-layers give."""
    for position in ("attention", "cross_attention", "feed_forward"):
        if position not in branches:
            continue
        branch = branches[position].reshape(hidden.shape)
        if row.skip == "post":
            hidden = layer.get_submodule(row.after[position])(hidden + branch)
        elif row.skip == "branch":
            hidden = hidden + layer.get_submodule(row.after[position])(branch)
        else:
            hidden = hidden + branch * (getattr(layer, row.after[position]) if row.skip == "factor" else 1)
    return hidden


@every_row
@torch.no_grad()
def test_place(row):
    """A bottleneck's input is the output of its sub-layer's projection, and its output is what meets the skip."""
    for name, layer, whole, projections, bottlenecks in record(row, adapted(row)):
        written_out = row.of_layer(row.layer, name) or partial(meet_skip, row)
        assert len(bottlenecks) == len(projections)
        # A list, because a layer that is written out may call recorded modules again.
        for call, (hidden, output) in enumerate(list(zip(whole.inputs, whole.outputs, strict=True))):
            branches = {
                position: bottleneck.outputs[call]
                for position, projection in projections.items()
                for bottleneck in bottlenecks
                if torch.equal(bottleneck.inputs[call], projection.outputs[call])
            }
            assert branches.keys() == projections.keys()
            torch.testing.assert_close(written_out(layer, hidden, branches), output)


@pytest.mark.parametrize("name", [name for name in ROWS if name.partition(":")[0] in SKIPS])
@torch.no_grad()
def test_skip_and_embeddings(name):
    """A bottleneck of Pfeiffer's kind reads the sum at the skip connection, and the first layer reads the coupling."""
    row, model_type = ROWS[name], name.partition(":")[0]
    options = {"positions": ("feed_forward",)} if model_type == "longformer" else {}
    options |= {"invertible": "nice"} if model_type in EMBEDDINGS else {}
    model = adapted(row, kind="pfeiffer", train_layer_norm=False, **options)
    couplings = [Recorder(module) for module in model.modules() if type(module) is HoulsbyEmbedding]
    assert len(couplings) == (model_type in EMBEDDINGS)
    layers = record(row, model)
    read = 0
    for _, layer, whole, projections, bottlenecks in layers:
        for call, (hidden, output) in enumerate(list(zip(whole.inputs, whole.outputs, strict=True))):
            for position in ("attention", "cross_attention", "feed_forward"):
                if position not in projections:
                    continue
                norm = layer.get_submodule(row.after[position]) if row.skip == "post" else torch.nn.Identity()
                given = branch = projections[position].outputs[call]
                for bottleneck in bottlenecks:
                    if torch.equal(bottleneck.inputs[call], given):
                        torch.testing.assert_close(bottleneck.reads[call], norm(hidden + given.reshape(hidden.shape)))
                        branch = bottleneck.outputs[call]
                        read += call == 0
                hidden = norm(hidden + branch.reshape(hidden.shape))
            torch.testing.assert_close(hidden, output)
    assert read == sum(len(bottlenecks) for *_, bottlenecks in layers) > 0
    for coupling in couplings:
        coupled = coupling.outputs[0]
        if mapping := FROM_NARROW_EMBEDDINGS.get(model_type):
            coupled = model.get_base_model().get_submodule(mapping)(coupled)
        torch.testing.assert_close(coupled, layers[0][2].inputs[0])


@every_row
@torch.no_grad()
def test_place_and_dropout(row):
    """Where a dropout module ends the sub-layer, the bottleneck sees the dropped activations."""
    model = adapted(row).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    for name, _, _, projections, bottlenecks in record(row, model):
        with_dropout = row.of_layer(row.dropout, name)
        seen = [bottleneck.inputs[0] for bottleneck in bottlenecks]
        for position, projection in projections.items():
            given = projection.outputs[0]
            alike = [hidden for hidden in seen if hidden.shape == given.shape]
            dropped = [torch.allclose(hidden, torch.where(hidden == 0, 0, 2 * given)) for hidden in alike]
            assert [torch.equal(hidden, given) for hidden in alike].count(True) == (position not in with_dropout)
            assert dropped.count(True) == (position in with_dropout)


@every_row
def test_dropout_after_the_adapter(row, monkeypatch):
    """The table says for every sub-layer whether a dropout follows the adapter."""
    model = adapted(row).train()
    base = model.get_base_model()
    late = {
        full_name(stack, index, end.output): end.late_dropout
        for (stack, index), ends in find_layers(
            base, dict(base_modules(base)), HoulsbyConfig(positions=EVERY_POSITION)
        ).items()
        for _, end in ends
    }
    recorders = {name: Recorder(base.get_submodule(name)) for name in late}
    dropped = []
    dropout = torch.nn.functional.dropout

    def record_dropout(hidden, *args, **kwargs):
        dropped.append(hidden.detach().clone())
        return dropout(hidden, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "dropout", record_dropout)
    model(**row.batch())
    given = {name: recorder.outputs[0] for name, recorder in recorders.items() if recorder.outputs}
    assert given.keys() == late.keys()
    sums = []
    if row.skip == "parallel":  # where the dropout is applied to the sum of both sub-layers
        names = list(given)
        sums = [given[first] + given[second] for first, second in zip(names[::2], names[1::2], strict=True)]

    def is_dropped(output):
        return any(hidden.shape == output.shape and torch.equal(hidden, output) for hidden in dropped)

    found = {
        name: is_dropped(output) or (bool(sums) and is_dropped(sums[number // 2]))
        for number, (name, output) in enumerate(given.items())
    }
    assert found == late


@every_row
def test_mixed_batch(row):
    """Rows of two adapters and of the base model in one batch give what each gives alone."""
    model = adapted(row, train_layer_norm="all")
    model.add_adapter("other", HoulsbyConfig(r=4, init_weights=False, train_layer_norm=True))
    model.set_adapter("other")
    perturb(model, seed=2)
    names = ["default", "__base__", "other"]
    batch = row.batch(rows=len(names))
    model.eval()
    if row.model_class.startswith("SeamlessM4T"):  # it runs without speech, which may thus belong to any row
        with pytest.raises(AdapterError, match="may belong to any row"):
            outputs(model, {**batch, "adapter_names": names})
        return
    mixed = outputs(model, {**batch, "adapter_names": names})
    for index, name in enumerate(names):
        own = {key: value[index : index + 1] for key, value in batch.items()}
        if name == "__base__":
            with model.disable_adapter():
                alone = outputs(model, own)
        else:
            model.set_adapter(name)
            alone = outputs(model, own)
        # Relative to the largest output, because some of these random models compute large ones.
        atol = 1e-5 * max(1, float(alone.abs().max()))
        torch.testing.assert_close(mixed[index : index + 1], alone, rtol=1e-5, atol=atol)


def task_models():
    """Row, class and PEFT's name of the task, for every class of transformers with a new head on a row's model."""
    tasks = {
        "SEQUENCE_CLASSIFICATION": "SEQ_CLS",
        "TOKEN_CLASSIFICATION": "TOKEN_CLS",
        "QUESTION_ANSWERING": "QUESTION_ANS",
        "MULTIPLE_CHOICE": None,
        "IMAGE_CLASSIFICATION": None,
        "SEMANTIC_SEGMENTATION": None,
        "AUDIO_CLASSIFICATION": None,
        "AUDIO_FRAME_CLASSIFICATION": None,
        "CTC": None,
    }
    for name, task in tasks.items():
        mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
        for model_type in sorted(ROWS.keys() & mapping.keys()):
            classes = mapping[model_type]
            for model_class in [classes] if isinstance(classes, str) else classes:
                yield pytest.param(ROWS[model_type], model_class, task, id=model_class)


@pytest.mark.parametrize(("row", "model_class", "task"), list(task_models()))
def test_head(row, model_class, task, tmp_path):
    """What a checkpoint of the bare model lacks is exactly what trains beside bottlenecks and norms."""
    changes = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]} if "Segmentation" in model_class else {}
    row.model(**changes).save_pretrained(tmp_path)
    for task_type in {None, task}:
        base, loading = getattr(transformers, model_class).from_pretrained(tmp_path, output_loading_info=True)
        weights = {name for name, _ in base.requires_grad_(True).named_parameters()}
        model = get_peft_model(base, HoulsbyConfig(r=4, task_type=task_type))
        trained = {
            name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
            for name, weight in model.named_parameters()
            if weight.requires_grad and "houlsby_" not in name
        }
        assert trained
        assert trained == loading["missing_keys"] & weights


def test_a_head_named_like_another_module_and_one_that_is_a_list():
    """The encoder's `feature_extractor` is not the head's, and of the list `tdnn` each module trains."""
    base = transformers.Wav2Vec2ForXVector(ROWS["wav2vec2"].model().config)
    model = get_peft_model(base, HoulsbyConfig(r=4))
    heads = {name.split(".modules_to_save")[0] for name, weight in model.named_parameters() if weight.requires_grad}
    heads = {name.removeprefix("base_model.model.") for name in heads if "houlsby_" not in name}
    tdnn = {f"tdnn.{index}" for index in range(len(base.tdnn))}
    assert heads == {"projector", *tdnn, "feature_extractor", "classifier", "objective"}
    model = get_peft_model(transformers.Wav2Vec2ForXVector(base.config), HoulsbyConfig(r=4, modules_to_save=[]))
    assert all("houlsby_" in name for name, weight in model.named_parameters() if weight.requires_grad)


def test_head_with_a_bare_weight():
    base = transformers.Wav2Vec2ForSequenceClassification(ROWS["wav2vec2"].model(use_weighted_layer_sum=True).config)
    with pytest.warns(
        UserWarning, match="layer_weights of Wav2Vec2ForSequenceClassification keeps its initial values"
    ):
        get_peft_model(base, HoulsbyConfig(r=4))
