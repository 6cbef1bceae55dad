"""Every architecture of the table, against its own code in transformers; the cases are in
`architecture_cases.py`.

The places are checked for every model type. What follows from the layer (saved files, mixed
batches, other kinds of adapters) is checked for one of each layer.
"""

from __future__ import annotations

from functools import partial
from inspect import signature

import pytest
import torch
import transformers
from peft import PeftModel, get_peft_model
from transformers.models.auto import modeling_auto

from architecture_cases import CASES
from houlsby_peft import AdapterError, HoulsbyConfig, HoulsbyLayer, HoulsbyLayerNorm
from houlsby_peft.method.coupling import HoulsbyEmbedding
from houlsby_peft.placement.table import ARCHITECTURES, EMBEDDINGS
from houlsby_peft.placement.view import View
from model_states import trained_names
from tiny_models import perturb


IMAGES = ("pixel_values", "visual_feats")


EVERY_POSITION = ("attention", "feed_forward", "cross_attention")
OUTPUTS = (
    ("text_embeds", "image_embeds"),
    ("last_hidden_state",),
    ("logits",),
    ("language_output", "vision_output"),
)
# What maps embeddings that are narrower than the layers.
FROM_NARROW_EMBEDDINGS = {
    "albert": "encoder.embedding_hidden_mapping_in",
    "electra": "embeddings_project",
    "rembert": "encoder.embedding_hidden_mapping_in",
}


def stacks(name):
    return ARCHITECTURES[name.partition(":")[0]]


def has_entries(name):
    """Whether the table tells what other kinds of adapters read, at least after feed-forwards."""
    ends = [end for stack in stacks(name) for end in stack.positions]
    return any(end.entry for position, end in ends if position == "feed_forward")


def one_of_each(names, key):
    """The first case of each layer."""
    return list({key(name): name for name in reversed(list(names))}.values())[::-1]


LAYERS = one_of_each(CASES, stacks)
WITH_ENTRIES = list(filter(has_entries, CASES))
OF_OTHER_KINDS = dict.fromkeys(
    one_of_each(WITH_ENTRIES, stacks) + one_of_each(WITH_ENTRIES, EMBEDDINGS.get)
)


def adapted(case, model=None, **options):
    """The case's model with a trained adapter, in eval mode."""
    torch.manual_seed(0)
    config = HoulsbyConfig(
        **{"r": 4, "positions": EVERY_POSITION, "init_weights": False, **options}
    )
    model = get_peft_model(case.model() if model is None else model, config)
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
    """Gradients of a training step by the name of the trainable weight, always with the same
    dropout.
    """
    torch.manual_seed(0)
    result = model.train()(**batch)
    sum(value.pow(2).sum() for value in result.values() if torch.is_tensor(value)).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


class Recorder:
    """Records, at every call of a module, its first input, its second one if it is a tensor, and
    its output.
    """

    def __init__(self, module):
        self.inputs, self.outputs, self.reads = [], [], []
        module.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs, output):
        # Copies, because some layers go on to change their tensors in place.
        self.inputs.append((args[0] if args else kwargs["hidden_states"]).detach().clone())
        self.reads += [value.detach().clone() for value in args[1:2] if torch.is_tensor(value)]
        self.outputs.append((output[0] if isinstance(output, tuple) else output).detach().clone())


def record(case, model):
    """Recorders, to be filled by a forward pass: for each layer, its own, its projections' and its
    bottlenecks'.
    """
    recorders = []
    for name, layer, ends in case.layers(model.get_base_model()):
        projections = {}
        for position, end in ends.items():
            projection = layer.get_submodule(end)
            projections[position] = Recorder(getattr(projection, "base_layer", projection))
        bottlenecks = []
        for module in layer.modules():
            if isinstance(module, HoulsbyLayer) and module.module_of("default") is not None:
                bottlenecks.append(Recorder(module.module_of("default")))
        recorders.append((name, layer, Recorder(layer), projections, bottlenecks))
    return recorders


def meet_skip(case, layer, hidden, branches):
    """The output of a layer, written out from its input and what the adapters of its sub-layers
    give.
    """
    for position in ("attention", "cross_attention", "feed_forward"):
        if position not in branches:
            continue
        branch = branches[position].reshape(hidden.shape)
        if case.skip == "post":
            hidden = layer.get_submodule(case.after[position])(hidden + branch)
        elif case.skip == "branch":
            hidden = hidden + layer.get_submodule(case.after[position])(branch)
        else:
            hidden = hidden + branch * (
                getattr(layer, case.after[position]) if case.skip == "factor" else 1
            )
    return hidden


def check_place(case, recorders):
    """A bottleneck's input is the output of its sub-layer's projection, and its output is what
    meets the skip.
    """
    for name, layer, whole, projections, bottlenecks in recorders:
        written_out = case.of_layer(case.layer, name) or partial(meet_skip, case)
        assert len(bottlenecks) == len(projections)
        # A list, because a layer that is written out may call recorded modules again.
        for call, (hidden, output) in enumerate(
            list(zip(whole.inputs, whole.outputs, strict=True))
        ):
            branches = {}
            for position, projection in projections.items():
                for bottleneck in bottlenecks:
                    if torch.equal(bottleneck.inputs[call], projection.outputs[call]):
                        branches[position] = bottleneck.outputs[call]
            assert branches.keys() == projections.keys()
            expected = written_out(layer, hidden, branches)
            torch.testing.assert_close(
                expected, output[: len(expected)]
            )  # Gemma 3n's first of several streams


def check_dropout(case, model):
    """A dropout module before the bottleneck drops its input."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    recorders = record(case, model)
    for name, gradient in gradients(model, case.batch()).items():
        assert "houlsby_" in name
        assert gradient is not None, name
        assert gradient.any(), name
    for name, _, _, projections, bottlenecks in recorders:
        with_dropout = case.of_layer(case.dropout, name)
        for position, projection in projections.items():
            output, equal, dropped = projection.outputs[0], 0, 0
            for bottleneck in bottlenecks:
                hidden = bottleneck.inputs[0]
                if hidden.shape == output.shape:
                    equal += torch.equal(hidden, output)
                    # With a probability of one half, what is not dropped is doubled.
                    doubled = torch.where(hidden == 0, 0, 2 * output)
                    dropped += torch.allclose(hidden, doubled)
            assert (equal, dropped) == ((0, 1) if position in with_dropout else (1, 0))


@pytest.mark.parametrize("name", CASES)
def test_places(name):
    case = CASES[name]
    model = adapted(case)
    expected = sum(len(ends) for *_, ends in case.layers(model.get_base_model()))
    assert sum(isinstance(module, HoulsbyLayer) for module in model.modules()) == expected
    assert sum(isinstance(module, HoulsbyLayerNorm) for module in model.modules()) == case.norms
    recorders = record(case, model)
    outputs(model, case.batch())
    with torch.no_grad():
        check_place(case, recorders)
    check_dropout(case, model)


@pytest.mark.parametrize("name", LAYERS)
def test_one_of_each_layer(name, tmp_path):
    """Disabled, saved and loaded, and in a mixed batch with the base model's rows."""
    case = CASES[name]
    names = ["default", "__base__", "other"]
    batch = case.batch(rows=len(names))
    # Frozen as PEFT freezes it, because PyTorch may choose other kernels for weights without a
    # gradient.
    base = case.model().requires_grad_(False)
    of_base = outputs(base, batch)
    model = adapted(case, base)
    with model.disable_adapter():
        torch.testing.assert_close(outputs(model, batch), of_base, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(case.model(), tmp_path).eval()
    of_first = outputs(model, batch)
    torch.testing.assert_close(outputs(loaded, batch), of_first)

    model.add_adapter("other", HoulsbyConfig(r=4, train_layer_norm="all", init_weights=False))
    model.set_adapter("other")
    perturb(model, seed=2)
    model.eval()
    if "input_ids" in batch and not batch.keys().isdisjoint(IMAGES):  # which may be of any row
        with pytest.raises(AdapterError, match="images"):
            outputs(model, {**batch, "adapter_names": names})
        return
    mixed = outputs(model, {**batch, "adapter_names": names})
    for index, expected in enumerate((of_first, of_base, outputs(model, batch))):
        # Relative to the largest output, because some of these random models compute large ones.
        atol = 1e-5 * max(1, float(expected[index].abs().max()))
        torch.testing.assert_close(mixed[index], expected[index], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", OF_OTHER_KINDS)
@torch.no_grad()
def test_skip_and_embeddings(name):
    """A bottleneck of Pfeiffer's kind reads the sum at the skip connection, and the first layer
    reads the coupling.
    """
    case, model_type = CASES[name], name.partition(":")[0]
    options = {"positions": ("feed_forward",)} if model_type == "longformer" else {}
    has_embeddings = model_type in EMBEDDINGS
    options |= {"invertible": "nice"} if has_embeddings else {}
    model = adapted(case, kind="pfeiffer", train_layer_norm=False, **options)
    couplings = [Recorder(module) for module in model.modules() if type(module) is HoulsbyEmbedding]
    assert len(couplings) == has_embeddings
    layers = record(case, model)
    model(**case.batch())
    read = sum(check_skip(case, *recorded) for recorded in layers)
    assert read == sum(len(bottlenecks) for *_, bottlenecks in layers) > 0
    for coupling in couplings:
        coupled = coupling.outputs[0]
        if mapping := FROM_NARROW_EMBEDDINGS.get(model_type):
            coupled = model.get_base_model().get_submodule(mapping)(coupled)
        torch.testing.assert_close(coupled, layers[0][2].inputs[0])


def check_skip(case, name, layer, whole, projections, bottlenecks):
    """Check what the bottlenecks of a layer read in each call; return how many there are."""
    readers = set()
    for call, (hidden, output) in enumerate(list(zip(whole.inputs, whole.outputs, strict=True))):
        for position in ("attention", "cross_attention", "feed_forward"):
            if position not in projections:
                continue
            norm = torch.nn.Identity()
            if case.skip == "post":
                norm = layer.get_submodule(case.after[position])
            branch = projected = projections[position].outputs[call]
            for bottleneck in bottlenecks:
                if torch.equal(bottleneck.inputs[call], projected):
                    at_skip = norm(hidden + projected.reshape(hidden.shape))
                    torch.testing.assert_close(bottleneck.reads[call], at_skip)
                    branch = bottleneck.outputs[call]
                    readers.add(bottleneck)
            hidden = norm(hidden + branch.reshape(hidden.shape))
        torch.testing.assert_close(hidden, output)
    return len(readers)


TASKS = (
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIPLE_CHOICE",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "AUDIO_CLASSIFICATION",
    "AUDIO_FRAME_CLASSIFICATION",
    "CTC",
)


@pytest.mark.parametrize("task", TASKS)
def test_head(task):
    """What a checkpoint of the bare model lacks is exactly what trains beside bottlenecks and
    norms.
    """
    classes = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    model_types = sorted(CASES.keys() & classes.keys())
    assert model_types
    changes = {}
    if task == "SEMANTIC_SEGMENTATION":
        changes = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
    for model_type in model_types:
        names = classes[model_type]
        for name in [names] if isinstance(names, str) else names:
            check_head(CASES[model_type], getattr(transformers, name), changes)


def check_head(case, model_class, changes):
    bare_class = getattr(transformers, case.model_class)
    config = bare_class.config_class(**{**case.config, **changes})
    # Whether a pooler is new is seen when a checkpoint is loaded.
    can_pool = "add_pooling_layer" in signature(bare_class).parameters
    with torch.device("meta"):
        bare = bare_class(config, add_pooling_layer=True) if can_pool else bare_class(config)
        base = model_class(config)
    in_bare, missing, of_head = names_in_encoder(bare), set(), set()
    heads = tuple(f"{name}." for name in View(base).head)
    assert heads
    for name, in_encoder in names_in_encoder(base).items():
        if in_encoder not in in_bare.values():
            missing.add(name)
        if name.startswith(heads):
            of_head.add(name)
    assert of_head == missing, model_class


def names_in_encoder(model):
    """The names of a model's weights, and what they are called within its encoder."""
    prefix = f"{model.base_model_prefix}."
    return {name: name.removeprefix(prefix) for name, _ in model.named_parameters()}


def test_a_head_named_like_another_module_and_one_that_is_a_list():
    """The encoder's `feature_extractor` is not the head's, and of the list `tdnn` each module
    trains.
    """
    base = transformers.Wav2Vec2ForXVector(CASES["wav2vec2"].model().config)
    model = get_peft_model(base, HoulsbyConfig(r=4))
    heads = set()
    for name in trained_names(model):
        if "houlsby_" not in name:
            heads.add(name.removeprefix("base_model.model.").split(".modules_to_save")[0])
    tdnn = {f"tdnn.{index}" for index in range(len(base.tdnn))}
    assert heads == {"projector", *tdnn, "feature_extractor", "classifier", "objective"}
    base = transformers.Wav2Vec2ForXVector(base.config)
    model = get_peft_model(base, HoulsbyConfig(r=4, modules_to_save=[]))
    assert all("houlsby_" in name for name in trained_names(model))
