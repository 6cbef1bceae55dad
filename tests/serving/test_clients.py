"""Clients of other services, as people have them, against this one."""

from __future__ import annotations

import numpy
import pytest
from huggingface_hub import InferenceClient
from peft import get_peft_model
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import houlsby_peft
from houlsby_peft import HoulsbyConfig
from hub_models import WORDS
from tiny_models import perturb


pytest.importorskip("uvicorn", reason="the extra serve is not installed")
from running_service import ServiceInThread


TAGS = {0: "O", 1: "B-PER", 2: "I-PER"}
HEADS = {
    "topics": (AutoModelForSequenceClassification, {"id2label": {0: "a", 1: "b", 2: "c"}}),
    "people": (AutoModelForTokenClassification, {"id2label": TAGS}),
    "answers": (AutoModelForQuestionAnswering, {}),
    "vectors": (AutoModel, {}),
}


@pytest.fixture(scope="module")
def service(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    for seed, (task, (auto_class, labels)) in enumerate(HEADS.items()):
        model = get_peft_model(auto_class.from_pretrained(base, **labels), HoulsbyConfig(r=4))
        perturb(model, seed)
        model.save_pretrained(folder / task)
    service = ServiceInThread(folder)
    yield service
    service.stop()


@pytest.fixture(scope="module")
def expected(service):
    """The predictors of the tasks."""
    return {task: houlsby_peft.load(service.adapters / task) for task in HEADS}


def client(service, task):
    return InferenceClient(base_url=f"{service.url}/tasks/{task}", token="none")


def unit(vector):
    return numpy.array(vector) / numpy.linalg.norm(vector)


def test_the_client_of_huggingface_hub(service, expected):
    [classes] = expected["topics"].predict(WORDS[0], top_k=3)
    found = client(service, "topics").text_classification(WORDS[0])
    assert [(item.label, pytest.approx(item.score, rel=1e-4)) for item in found] == [
        (item["label"], item["score"]) for item in classes
    ]
    assert len(client(service, "topics").text_classification(WORDS[0], top_k=1)) == 1
    [entities] = expected["people"].predict(WORDS[1])
    found = client(service, "people").token_classification(WORDS[1])
    assert [(item.entity_group, item.start, item.end) for item in found] == [
        (item["entity_group"], item["start"], item["end"]) for item in entities
    ]
    vectors = [unit(vector) for vector in expected["vectors"].predict(WORDS[:2])]
    for text, vector in zip(WORDS, vectors, strict=False):
        found = client(service, "vectors").feature_extraction(text)
        numpy.testing.assert_allclose(found, [vector], rtol=1e-3, atol=1e-5)
    found = client(service, "vectors").feature_extraction(WORDS[:2], normalize=False)
    raw = expected["vectors"].predict(WORDS[:2])
    numpy.testing.assert_allclose(found, raw, rtol=1e-3, atol=1e-4)
    [answer] = expected["answers"].predict((WORDS[2], WORDS[3]))
    found = client(service, "answers").question_answering(question=WORDS[2], context=WORDS[3])
    assert (found.answer, found.start) == (answer["answer"], answer["start"])


def test_the_client_of_openai(service, expected):
    openai = pytest.importorskip("openai", reason="the extra test is not installed")
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == sorted(HEADS)
        assert client.models.retrieve("topics").id == "topics"
        vectors = [unit(vector) for vector in expected["vectors"].predict(WORDS[:2])]
        for form in ({}, {"encoding_format": "float"}):
            found = client.embeddings.create(model="vectors", input=WORDS[:2], **form)
            for item, vector in zip(found.data, vectors, strict=True):
                numpy.testing.assert_allclose(item.embedding, vector, rtol=1e-3, atol=1e-5)
        assert found.usage.prompt_tokens > 0
        found = client.embeddings.create(model="vectors", input=WORDS[0], dimensions=5)
        short = unit(expected["vectors"].predict(WORDS[0])[0][:5])
        numpy.testing.assert_allclose(found.data[0].embedding, short, rtol=1e-3, atol=1e-5)
        with pytest.raises(openai.NotFoundError, match="got nothing"):
            client.embeddings.create(model="nothing", input="a")
        with pytest.raises(openai.APIStatusError, match="'topics' is text-classification"):
            client.embeddings.create(model="topics", input="a")


def test_requests_of_text_embeddings_inference_and_vllm(service, expected):
    single, both = expected["topics"].predict(WORDS[:2], top_k=3)
    names = [[item["label"] for item in classes] for classes in (single, both)]

    def labels(classes):
        return [item["label"] for item in classes]

    path = "/tasks/topics/predict"
    status, found = service.post(path, {"inputs": WORDS[0], "truncate": True})
    assert (status, labels(found)) == (200, names[0])
    status, found = service.post(path, {"inputs": [[WORDS[0]], [WORDS[1]]]})
    assert [labels(classes) for classes in found] == names
    status, pair = service.post(path, {"inputs": [WORDS[0], WORDS[1]]})
    [of_pair] = expected["topics"].predict((WORDS[0], WORDS[1]), top_k=3)
    assert labels(pair) == labels(of_pair)
    status, found = service.post("/predict", {"inputs": WORDS[0], "model": "topics"})
    assert labels(found) == names[0]
    status, found = service.post("/predict", {"inputs": WORDS[0]})
    assert (status, found["error_type"]) == (422, "validation")
    assert "4 tasks" in found["error"]
    status, found = service.post("/tasks/vectors/embed", {"inputs": [WORDS[0]]})
    numpy.testing.assert_allclose(found, [unit(expected["vectors"].predict(WORDS[0])[0])], 1e-3)
    status, found = service.post("/embed", {"inputs": WORDS[0], "model": "vectors"})
    assert (status, len(found)) == (200, 1)
    assert service.post(path, {"inputs": WORDS[0], "raw_scores": True})[0] == 422
    assert service.post("/tasks/topics/embed", {"inputs": "a"})[0] == 424
    assert service.post("/tasks/vectors/predict", {"inputs": "a"})[0] == 424
    status, info = service.ask("/tasks/topics/info")
    assert info["model_type"]["classifier"]["id2label"] == {"0": "a", "1": "b", "2": "c"}
    assert service.ask("/tasks/vectors/info")[1]["model_type"] == {"embedding": {"pooling": "mean"}}
    assert service.ask("/tasks/vectors/health")[0] == 200
    assert service.ask("/tasks/nothing/health")[0] == 404
    status, found = service.post("/classify", {"model": "topics", "input": WORDS[:2]})
    for item, classes in zip(found["data"], (single, both), strict=True):
        score_of = {entry["label"]: entry["score"] for entry in classes}
        assert item["label"] == classes[0]["label"]
        assert item["probs"] == pytest.approx([score_of[label] for label in "abc"], rel=1e-3)
        assert item["num_classes"] == 3
    status, found = service.post("/classify", {"model": "nothing", "input": "a"})
    assert (status, found["error"]["code"]) == (404, 404)


def check_as_the_router(answer, labels):
    """Check what `alignScoresToMapping` of vLLM's semantic router checks (http_classifier.go)."""
    assert sorted(entry["label"] for entry in answer) == sorted(labels)
    assert sum(entry["score"] for entry in answer) == pytest.approx(1, abs=0.02)


def check_spans_as_the_router(spans, text, labels):
    """Check what `alignTokenSpans` of the router checks (http_token_classifier.go): a span points
    to letters of the text, which are not bytes.
    """
    places = set()
    for span in spans:
        assert span["entity_group"] in labels
        assert 0 <= span["start"] < span["end"] <= len(text)
        assert text[span["start"] : span["end"]] == span["word"]
        assert 0 <= span["score"] <= 1
        places.add((span["entity_group"], span["start"], span["end"]))
    assert len(places) == len(spans) > 0


def test_the_router_of_vllm(service, expected, base):
    status, found = service.post("/tasks/topics/classify", {"inputs": WORDS[0]})
    assert status == 200
    check_as_the_router(found, "abc")
    text = f"\u00dcber \U0001f600 {WORDS[1]}"
    status, found = service.post("/tasks/people/classify", {"inputs": text})
    check_spans_as_the_router(found, text, {"PER"})
    assert service.post("/classify", {"inputs": WORDS[0], "model": "topics"})[0] == 200
    assert service.post("/tasks/vectors/classify", {"inputs": "a"})[0] == 424
    # It sends neither a name nor a path: each task has a service, or a port of a reverse proxy.
    alone = ServiceInThread(service.adapters / "topics")
    try:
        status, found = alone.post("/classify", {"inputs": WORDS[0]})
        check_as_the_router(found, "abc")
        status, found = alone.predict({"text": WORDS[0]})
        assert found["predictions"] == expected["topics"].predict(WORDS[0])
        assert alone.headers["x-adapters"].startswith("topics=")
    finally:
        alone.stop()


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/tasks/topics/predict", {"inputs": ""}, 400, "text to read"),
        ("/tasks/topics/predict", {"inputs": ["", " "]}, 400, "text to read"),
        ("/tasks/vectors/embed", {"inputs": ""}, 400, "text to read"),
        ("/tasks/vectors/embed", {"inputs": "a", "dimensions": 5000}, 422, "at most 32"),
        ("/tasks/vectors/embed", {"inputs": "a", "prompt_name": "query"}, 422, "no prompts"),
        ("/tasks/vectors/embed", {"inputs": "a " * 99, "truncate": False}, 422, "64 tokens; got"),
        ("/tasks/vectors/embed", {"inputs": "a " * 99, "truncate": True}, 200, ""),
        ("/tasks/topics/predict", {"inputs": "a " * 99, "truncate": False}, 422, "64 tokens; got"),
        ("/tasks/people", {"inputs": "a " * 99, "truncate": False}, 200, ""),
        ("/tasks/people", {"inputs": "a", "parameters": {"top_k": 2}}, 422, "top_k"),
        ("/v1/embeddings", {"input": [1, 2], "model": "vectors"}, 422, "check_embedding_ctx"),
        ("/v1/embeddings", {"input": [[1, 2]], "model": "vectors"}, 422, "check_embedding_ctx"),
        ("/classify", {"model": "topics"}, 422, "either"),
    ],
)
def test_what_other_services_accept_and_refuse(service, path, body, status, word):
    answer, found = service.post(path, body)
    assert answer == status
    assert word in str(found)
