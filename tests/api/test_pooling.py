"""Calls for numbers over HTTP, with OpenAI's client, and a worker that says what the test says."""

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from jobs.protocol.endpoints import POOLING_ENDPOINTS
from jobs.protocol.pooling_parameters import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE
from jobs.protocol.requests import Claim
from jobs.protocol.results import Result, Usage, encode_json
from jobs.protocol.validation import body_schema
from tests.api.scripted_worker import MODEL, ScriptedWorker

Scripted = Callable[..., ScriptedWorker]
PAIR = {"queries": "x", "documents": ["y"], "query": "x"}


def embedded(claim: Claim) -> Result:
    """One number for each text, in the form that the call asks for."""
    call = POOLING_ENDPOINTS[claim.request.endpoint].read(json.loads(claim.request.body))
    number: Any = [1.5] if call.encoding_format == "float" else base64.b64encode(b"\0\0\xc0\x3f").decode()
    data = [{"object": "embedding", "index": i, "embedding": number} for i in range(len(call.inputs))]
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    body = {"object": "list", "data": data, "model": call.model, "usage": usage}
    return Result(200, encode_json(body), Usage(2), "req_1")


def test_the_clients_create_gives_numbers(client: openai.OpenAI, scripted: Scripted) -> None:
    worker = scripted(embedded, tasks=("embed", "tokenize"))
    made = client.embeddings.create(model=MODEL, input=["x", "y"])  # base64 by default
    assert [(item.index, item.embedding) for item in made.data] == [(0, [1.5]), (1, [1.5])]
    assert (made.model, made.usage.prompt_tokens) == (MODEL, 2)
    assert client.embeddings.create(model=MODEL, input="x", encoding_format="float").data[0].embedding == [1.5]
    assert json.loads(worker.claims[0].request.body)["encoding_format"] == "base64"


@pytest.mark.parametrize("url", [SCORE, "/score", RERANK, "/rerank", "/v2/rerank", POOLING])
def test_others_have_their_urls(http: httpx.Client, scripted: Scripted, url: str) -> None:
    worker = scripted(lambda claim: Result(200, b"{}", Usage(), "req_1"), tasks=("embed",))
    assert http.post(url, json={"model": MODEL, "input": "x", **PAIR}).status_code == 200
    assert worker.claims[0].request.endpoint == f"/v1/{url.rpartition('/')[2]}"


def test_a_model_that_does_something_else_says_what(http: httpx.Client, scripted: Scripted) -> None:
    worker = scripted(embedded, tasks=("generate", "tokenize"))
    answer = http.post(EMBEDDINGS, json={"model": MODEL, "input": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": f"The model `{MODEL}` cannot be used with /v1/embeddings. It answers: /v1/chat/completions,"
        " /v1/completions, /tokenize, /detokenize.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "unsupported_endpoint",
    }
    assert worker.claims == []


def test_an_embedding_model_does_not_chat(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(embedded, tasks=("embed", "tokenize"))
    with pytest.raises(openai.BadRequestError, match="It answers: /v1/embeddings, /v1/score"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("url", POOLING_ENDPOINTS)
def test_the_document_has_the_body_of_the_reader(http: httpx.Client, url: str) -> None:
    operation = http.get("/openapi.json").json()["paths"][url]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == body_schema(url)
    answered = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert "$ref" in answered or "usage" in answered["required"]
    assert url != CLASSIFY or answered["properties"]["data"]["items"]["required"][1:] == [
        "label",
        "probs",
        "num_classes",
    ]
