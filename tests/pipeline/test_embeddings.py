"""Embeddings and scores end to end: the official client, HTTP, Redis, a worker and small models,
compared with what transformers computes.
"""

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import openai
import pytest
import torch

from batch_inference_pipeline import AsyncPipeline, Pipeline
from batch_inference_pipeline.vllm_shapes import EmbeddedOutput
from jobs.protocol.states import END_STATES
from tests.support import http_calls
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.pooling_models import LONGEST, SIZE, embedding, save_cross_encoder, save_embedder, score
from tests.support.small_tokenizers import bert
from tests.support.waiting import wait_until

TEXTS = ["The quick brown fox", "jumps over the lazy dog", "add 1 2 and 3 0"]


class ServedEmbedder(NamedTuple):
    """A running `pipeline serve` with an embedding model, and that model."""

    url: str
    model: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEmbedder]:
    folder = tmp_path_factory.mktemp("embedder")
    model = save_embedder(folder)
    flags = ("--model", folder, "--served-model-name", "small", "--port", 0, "--dtype", "float32")
    with running_pipeline("serve", *flags, "--file-store", tmp_path_factory.mktemp("store")) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        command.wait_for("worker INFO ready")
        wait_until(lambda: http_calls.get(f"{found[1]}/ready").status_code == 200, 60, "the model to be served")
        yield ServedEmbedder(found[1], model)


@pytest.fixture
def client(served: ServedEmbedder) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ids(text: str) -> list[int]:
    found: list[int] = bert().encode(text).ids
    return found


def close(given: list[float], expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(given), expected, atol=1e-5)


def test_the_clients_create_gives_what_the_model_does(served: ServedEmbedder, client: openai.OpenAI) -> None:
    expected = [embedding(served.model, ids(text)) for text in TEXTS]
    for given in (TEXTS, [ids(text) for text in TEXTS]):
        made = client.embeddings.create(model="small", input=given)  # base64 is what the client asks for
        assert [item.index for item in made.data] == [0, 1, 2]
        assert all(close(item.embedding, one) for item, one in zip(made.data, expected, strict=True))
        assert made.usage.prompt_tokens == made.usage.total_tokens == sum(len(ids(text)) for text in TEXTS)
    plain = client.embeddings.create(model="small", input=TEXTS[0], encoding_format="float")
    again = client.embeddings.create(model="small", input=TEXTS[0])
    assert torch.equal(torch.tensor(plain.data[0].embedding), torch.tensor(again.data[0].embedding))
    assert len(plain.data[0].embedding) == SIZE
    half = client.embeddings.create(
        model="small", input=TEXTS[0], encoding_format="base64", extra_body={"embed_dtype": "float16"}
    )
    decoded = numpy.frombuffer(base64.b64decode(str(half.data[0].embedding)), "<f2")
    assert decoded.tolist() == numpy.float32(plain.data[0].embedding).astype("<f2").tolist()
    named = client.embeddings.create(model="small", input="fox", extra_body={"prompt_name": "query"})
    assert close(named.data[0].embedding, embedding(served.model, ids("the dog: fox")))


def test_the_async_client_does_too(served: ServedEmbedder) -> None:
    async def create() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            calls = (client.embeddings.create(model="small", input=TEXTS[i % 3]) for i in range(12))
            return await asyncio.gather(*calls)

    for i, made in enumerate(asyncio.run(create())):
        assert close(made.data[0].embedding, embedding(served.model, ids(TEXTS[i % 3])))


def test_embed_of_the_python_client_gives_what_the_model_does(served: ServedEmbedder) -> None:
    async def embed() -> list[EmbeddedOutput]:
        async with AsyncPipeline(base_url=f"{served.url}/v1") as p:
            return await p.embed(TEXTS)

    with Pipeline(base_url=f"{served.url}/v1") as p:
        for made in (p.embed(TEXTS), asyncio.run(embed())):
            assert [one.prompt for one in made] == TEXTS
            assert all(close(one.outputs.embedding, embedding(served.model, ids(str(one.prompt)))) for one in made)
        [alone] = p.embed(TEXTS[0])
    assert close(alone.outputs.embedding, embedding(served.model, ids(TEXTS[0])))


def test_as_many_inputs_as_a_call_may_have(served: ServedEmbedder, client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="small", input=[TEXTS[i % 3] for i in range(2048)])
    expected = [embedding(served.model, ids(text)) for text in TEXTS]
    assert all(close(item.embedding, expected[i % 3]) for i, item in enumerate(made.data))
    assert len(made.data) == 2048


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "Invalid 'input': empty string"),
        ({"input": ["x"] * 2049}, "maximum length 2048"),
        (
            {"input": "fox " * LONGEST},
            f"maximum context length is {LONGEST} tokens. However, your input resulted in 34",
        ),
        ({"input": "fox", "dimensions": 8}, "can have 16, but not 8"),
        ({"input": "fox", "extra_body": {"embed_dtype": "int8"}}, "Supported values are: 'float32', 'float16'"),
        ({"input": [10_000]}, "Expected a token id"),
    ],
)
def test_bad_input_is_one_sentence(client: openai.OpenAI, body: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(message)):
        client.embeddings.create(model="small", **body)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/score", {"text_1": "x", "text_2": ["x"] * 2049}),
        ("/v1/rerank", {"query": "x", "documents": ["x"] * 2049}),
        ("/v1/pooling", {"input": ["x"] * 2049}),
    ],
)
def test_more_inputs_than_a_call_may_have(served: ServedEmbedder, url: str, body: dict[str, Any]) -> None:
    answer = http_calls.post(f"{served.url}{url}", json={"model": "small", **body})
    assert answer.status_code == 400
    assert "maximum length 2048" in answer.json()["error"]["message"]


def test_what_is_too_long_is_cut_where_that_is_asked_for(served: ServedEmbedder, client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="small", input="fox " * 500, extra_body={"truncate_prompt_tokens": -1})
    assert close(made.data[0].embedding, embedding(served.model, ids("fox " * (LONGEST - 2))))
    assert made.usage.prompt_tokens == LONGEST


def test_a_model_says_what_it_answers(served: ServedEmbedder, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="It answers: /v1/embeddings, /v1/score, /v1/rerank, /v1/pooling"):
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}])
    answer = http_calls.post(f"{served.url}/v1/pooling", json={"model": "small", "input": "fox", "task": "token_embed"})
    assert len(answer.json()["data"][0]["data"]) == len(ids("fox"))


def test_texts_are_ranked_by_their_embeddings(served: ServedEmbedder) -> None:
    body = {"model": "small", "query": TEXTS[0], "documents": TEXTS}
    results = http_calls.post(f"{served.url}/v1/rerank", json=body).json()["results"]
    query, *documents = (embedding(served.model, ids(text)) for text in (TEXTS[0], *TEXTS))
    assert results[0]["index"] == 0
    for result in results:
        assert result["relevance_score"] == pytest.approx(float(query @ documents[result["index"]]), abs=1e-5)


def lines(url: str, bodies: list[dict[str, Any]]) -> bytes:
    made = [{"custom_id": f"{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return "".join(json.dumps(line) + "\n" for line in made).encode()


def test_a_batch_may_have_the_lines_of_each_endpoint(served: ServedEmbedder, client: openai.OpenAI) -> None:
    expected = [embedding(served.model, ids(text)) for text in TEXTS]
    similar = pytest.approx(float(expected[0] @ expected[1]), abs=1e-5)
    bodies = {
        "/v1/pooling": {"input": TEXTS[0]},
        "/v1/score": {"text_1": TEXTS[0], "text_2": TEXTS[1]},
        "/v1/rerank": {"query": TEXTS[0], "documents": [TEXTS[1]]},
    }
    made = {}
    for url, body in bodies.items():
        file = client.files.create(file=("x.jsonl", lines(url, [{"model": "small", **body}])), purpose="batch")
        made[url] = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h").id  # type: ignore[arg-type]
    answers = {}
    for url, name in made.items():
        wait_until(lambda name=name: client.batches.retrieve(name).status in END_STATES, 60, "the batch to end")
        output = client.batches.retrieve(name).output_file_id
        assert output is not None
        answers[url] = json.loads(client.files.content(output).text)["response"]["body"]
    assert close(answers["/v1/pooling"]["data"][0]["data"], expected[0])
    assert answers["/v1/score"]["data"][0]["score"] == similar
    assert answers["/v1/rerank"]["results"][0]["relevance_score"] == similar


def test_a_batch_of_the_api_has_embeddings(served: ServedEmbedder, client: openai.OpenAI) -> None:
    url = "/v1/embeddings"
    bodies = [{"model": "small", "input": TEXTS[i % 3]} for i in range(60)]
    bodies[7]["input"] = "fox " * LONGEST
    file = client.files.create(file=("x.jsonl", lines(url, bodies)), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status in END_STATES, 60, "the batch to end")
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", 59)
    assert batch.output_file_id is not None
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    expected = [embedding(served.model, ids(text)) for text in TEXTS]
    for result in results:
        body = result["response"]["body"]
        assert close(body["data"][0]["embedding"], expected[int(result["custom_id"]) % 3])
    assert batch.error_file_id is not None
    error = json.loads(client.files.content(batch.error_file_id).text)
    assert (error["custom_id"], error["response"]["status_code"]) == ("7", 400)


def test_a_batch_for_another_task_is_refused(client: openai.OpenAI) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
    file = client.files.create(file=("x.jsonl", lines("/v1/chat/completions", [body])), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status in END_STATES, 60, "the batch to end")
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "unsupported_endpoint"


@pytest.mark.proof
def test_run_batch_scores_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "cross"
    model = save_cross_encoder(folder)
    source, output = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    bodies: list[dict[str, Any]] = [{"query": TEXTS[0], "documents": TEXTS, "top_n": 2}]
    source.write_bytes(
        lines("/v2/rerank", bodies)
        + lines("/v1/score", [{"queries": TEXTS[0], "documents": TEXTS}]).replace(b'"0"', b'"score"')
        + lines("/v1/classify", [{"input": TEXTS[1]}]).replace(b'"0"', b'"class"')
        + lines("/v1/embeddings", [{"input": TEXTS[1]}]).replace(b'"0"', b'"other"')
    )
    done = run_pipeline("run-batch", source, "--model", folder, "-o", output, "--dtype", "float32")
    results = {line["custom_id"]: line["response"] for line in map(json.loads, output.read_text().splitlines())}
    encoded = [bert().encode(TEXTS[0], text) for text in TEXTS]
    expected = [score(model, one.ids, one.type_ids.index(1)) for one in encoded]
    assert [item["score"] for item in results["score"]["body"]["data"]] == pytest.approx(expected, abs=1e-5)
    best = sorted(range(3), key=lambda i: -expected[i])[:2]
    assert [item["index"] for item in results["0"]["body"]["results"]] == best
    assert results["class"]["body"]["data"][0]["num_classes"] == 1
    assert results["other"]["status_code"] == 400
    assert "It answers: /v1/score" in results["other"]["body"]["error"]["message"]
    assert done.returncode == 0
