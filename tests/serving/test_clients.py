"""Clients of other services, as people have them, against this one."""

from __future__ import annotations

import numpy
import pytest
from huggingface_hub import InferenceClient
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import houlsby_peft
from hub_models import WORDS, save_adapter


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
    for seed, (task, (model_class, head)) in enumerate(HEADS.items()):
        save_adapter(folder / task, base, model_class, head, seed)
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


def labels(results):
    return [result["label"] for result in results]


def assert_near(vectors, expected):
    numpy.testing.assert_allclose(vectors, expected, rtol=1e-3, atol=1e-4)


class TestTheClientOfHuggingfaceHub:
    def test_text_classification(self, service, expected):
        [results] = expected["topics"].predict(WORDS[0], top_k=3)
        answer = client(service, "topics").text_classification(WORDS[0])
        assert [item.label for item in answer] == labels(results)
        scores = [result["score"] for result in results]
        assert [item.score for item in answer] == pytest.approx(scores, rel=1e-4)
        assert len(client(service, "topics").text_classification(WORDS[0], top_k=1)) == 1

    def test_token_classification(self, service, expected):
        [entities] = expected["people"].predict(WORDS[1])
        answer = client(service, "people").token_classification(WORDS[1])
        for item, entity in zip(answer, entities, strict=True):
            assert (item.start, item.end) == (entity["start"], entity["end"])
            assert item.entity_group == entity["entity_group"]

    def test_feature_extraction(self, service, expected):
        vectors = expected["vectors"].predict(WORDS[:2])
        of_task = client(service, "vectors")
        for text, vector in zip(WORDS, vectors, strict=False):
            assert_near(of_task.feature_extraction(text), [unit(vector)])
        assert_near(of_task.feature_extraction(WORDS[:2], normalize=False), vectors)

    def test_question_answering(self, service, expected):
        [result] = expected["answers"].predict((WORDS[2], WORDS[3]))
        of_task = client(service, "answers")
        answer = of_task.question_answering(question=WORDS[2], context=WORDS[3])
        assert (answer.answer, answer.start) == (result["answer"], result["start"])


def test_the_client_of_openai(service, expected):
    openai = pytest.importorskip("openai", reason="the extra test is not installed")
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == sorted(HEADS)
        assert client.models.retrieve("topics").id == "topics"
        vectors = expected["vectors"].predict(WORDS[:2])
        for form in ({}, {"encoding_format": "float"}):
            answer = client.embeddings.create(model="vectors", input=WORDS[:2], **form)
            for item, vector in zip(answer.data, vectors, strict=True):
                assert_near(item.embedding, unit(vector))
        assert answer.usage.prompt_tokens > 0
        answer = client.embeddings.create(model="vectors", input=WORDS[0], dimensions=5)
        assert_near(answer.data[0].embedding, unit(vectors[0][:5]))
        with pytest.raises(openai.NotFoundError, match="nothing"):
            client.embeddings.create(model="nothing", input="a")
        with pytest.raises(openai.APIStatusError, match="text-classification"):
            client.embeddings.create(model="topics", input="a")


class TestRequestsOfTextEmbeddingsInference:
    def test_predict(self, service, expected):
        first, second = expected["topics"].predict(WORDS[:2], top_k=3)
        [of_pair] = expected["topics"].predict((WORDS[0], WORDS[1]), top_k=3)
        path = "/tasks/topics/predict"
        status, answer = service.post(path, {"inputs": WORDS[0], "truncate": True})
        assert (status, labels(answer)) == (200, labels(first))
        several = service.post(path, {"inputs": [[WORDS[0]], [WORDS[1]]]})[1]
        assert [labels(results) for results in several] == [labels(first), labels(second)]
        pair = service.post(path, {"inputs": [WORDS[0], WORDS[1]]})[1]
        assert labels(pair) == labels(of_pair)
        by_model = service.post("/predict", {"inputs": WORDS[0], "model": "topics"})[1]
        assert labels(by_model) == labels(first)

    def test_embed(self, service, expected):
        vector = unit(expected["vectors"].predict(WORDS[0])[0])
        for path, body in (
            ("/tasks/vectors/embed", {"inputs": [WORDS[0]]}),
            ("/embed", {"inputs": WORDS[0], "model": "vectors"}),
        ):
            assert_near(service.post(path, body)[1], [vector])

    def test_info(self, service):
        info = service.ask("/tasks/topics/info")[1]
        assert info["model_type"]["classifier"]["id2label"] == {"0": "a", "1": "b", "2": "c"}
        info = service.ask("/tasks/vectors/info")[1]
        assert info["model_type"] == {"embedding": {"pooling": "mean"}}
        assert service.ask("/tasks/vectors/health")[0] == 200
        assert service.ask("/tasks/nothing/health")[0] == 404


def test_requests_of_vllm(service, expected):
    answer = service.post("/classify", {"model": "topics", "input": WORDS[:2]})[1]
    for item, results in zip(
        answer["data"], expected["topics"].predict(WORDS[:2], top_k=3), strict=True
    ):
        scores = {result["label"]: result["score"] for result in results}
        assert item["label"] == results[0]["label"]
        assert item["probs"] == pytest.approx([scores[label] for label in "abc"], rel=1e-3)
        assert item["num_classes"] == 3
    status, answer = service.post("/classify", {"model": "nothing", "input": "a"})
    assert (status, answer["error"]["code"]) == (404, 404)


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


def test_the_router_of_vllm(service):
    status, answer = service.post("/tasks/topics/classify", {"inputs": WORDS[0]})
    assert status == 200
    check_as_the_router(answer, "abc")
    text = f"\u00dcber \U0001f600 {WORDS[1]}"
    spans = service.post("/tasks/people/classify", {"inputs": text})[1]
    check_spans_as_the_router(spans, text, {"PER"})
    assert service.post("/classify", {"inputs": WORDS[0], "model": "topics"})[0] == 200


def test_a_service_of_one_task_needs_no_name(service, expected):
    """The router sends neither a name nor a path: each task has a service, or a port of a reverse
    proxy.
    """
    alone = ServiceInThread(service.adapters / "topics")
    try:
        check_as_the_router(alone.post("/classify", {"inputs": WORDS[0]})[1], "abc")
        answer = alone.predict({"text": WORDS[0]})[1]
        assert answer["predictions"] == expected["topics"].predict(WORDS[0])
        assert alone.headers["x-adapters"].startswith("topics=")
    finally:
        alone.stop()


LONG = "a " * 99


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/predict", {"inputs": "a"}, 422, "4 tasks"),
        ("/tasks/topics/embed", {"inputs": "a"}, 424, ""),
        ("/tasks/vectors/predict", {"inputs": "a"}, 424, ""),
        ("/tasks/vectors/classify", {"inputs": "a"}, 424, ""),
        ("/tasks/topics/predict", {"inputs": "a", "raw_scores": True}, 422, ""),
        ("/tasks/topics/predict", {"inputs": ""}, 400, "text"),
        ("/tasks/topics/predict", {"inputs": ["", " "]}, 400, "text"),
        ("/tasks/vectors/embed", {"inputs": ""}, 400, "text"),
        ("/tasks/vectors/embed", {"inputs": "a", "dimensions": 5000}, 422, "32"),
        ("/tasks/vectors/embed", {"inputs": "a", "prompt_name": "query"}, 422, "prompts"),
        ("/tasks/vectors/embed", {"inputs": LONG, "truncate": False}, 422, "64 tokens"),
        ("/tasks/vectors/embed", {"inputs": LONG, "truncate": True}, 200, ""),
        ("/tasks/topics/predict", {"inputs": LONG, "truncate": False}, 422, "64 tokens"),
        ("/tasks/people", {"inputs": LONG, "truncate": False}, 200, ""),
        ("/tasks/people", {"inputs": "a", "parameters": {"top_k": 2}}, 422, "top_k"),
        ("/v1/embeddings", {"input": [1, 2], "model": "vectors"}, 422, "check_embedding_ctx"),
        ("/v1/embeddings", {"input": [[1, 2]], "model": "vectors"}, 422, "check_embedding_ctx"),
        ("/classify", {"model": "topics"}, 422, "either"),
    ],
)
def test_what_other_services_accept_and_refuse(service, path, body, status, word):
    answer_status, answer = service.post(path, body)
    assert answer_status == status
    assert word in str(answer)
