"""A chat model, an embedding model and a cross-encoder under one address."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
import torch

from tests.support import http_calls
from tests.support.commands import running_pipeline
from tests.support.pooling_models import embedding, save_cross_encoder, save_embedder, score
from tests.support.small_tokenizers import bert
from workers.settings import DEMO_MODEL

pytestmark = pytest.mark.proof

QUERY, DOCUMENTS = "The quick brown fox", ["jumps over the lazy dog", "add 1 2 and 3 0"]


class Models(NamedTuple):
    """An address, and the two models there that give numbers."""

    url: str
    embedder: Any
    cross_encoder: Any


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    embedder, cross = tmp_path_factory.mktemp("embedder"), tmp_path_factory.mktemp("cross")
    saved = save_embedder(embedder), save_cross_encoder(cross)
    config = json.loads((embedder / "config.json").read_text()) | {"matryoshka_dimensions": [16, 8]}
    (embedder / "config.json").write_text(json.dumps(config))
    named = {"chat": DEMO_MODEL, "embed": embedder, "rank": cross}
    flags = [flag for name, folder in named.items() for flag in ("--model", f"{name}={folder}")]
    store = tmp_path_factory.mktemp("store")
    with running_pipeline("serve", *flags, "--port", 0, "--dtype", "float32", "--file-store", store) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        yield Models(found[1], *saved)


@pytest.fixture
def client(models: Models) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{models.url}/v1", api_key="none", timeout=150) as client:
        yield client


def test_a_chat_and_an_embedding(models: Models, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "Say hello."}], max_tokens=4
    )
    assert answer.choices[0].message.content
    [made] = client.embeddings.create(model="embed", input=QUERY).data
    expected = embedding(models.embedder, bert().encode(QUERY).ids)
    torch.testing.assert_close(torch.tensor(made.embedding), expected, rtol=0, atol=1e-5)


def test_each_model_says_what_it_answers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"It answers: .*/v1/chat/completions"):
        client.embeddings.create(model="chat", input=QUERY)
    with pytest.raises(openai.BadRequestError, match="It answers: /v1/embeddings"):
        client.completions.create(model="embed", prompt=QUERY)


def test_an_embedding_of_fewer_dimensions(models: Models, client: openai.OpenAI) -> None:
    [made] = client.embeddings.create(model="embed", input=QUERY, dimensions=8).data
    expected = torch.nn.functional.normalize(embedding(models.embedder, bert().encode(QUERY).ids)[:8], dim=0)
    torch.testing.assert_close(torch.tensor(made.embedding), expected, rtol=0, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="embed", input=QUERY, dimensions=7)


def test_scores_ranks_and_classes_of_a_cross_encoder(models: Models) -> None:
    def ask(url: str, **body: Any) -> Any:
        return http_calls.post(f"{models.url}{url}", json={"model": "rank", **body}).json()

    pairs = [bert().encode(QUERY, text) for text in DOCUMENTS]
    expected = [score(models.cross_encoder, pair.ids, pair.type_ids.index(1)) for pair in pairs]
    scored = ask("/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [one["score"] for one in scored] == pytest.approx(expected, abs=1e-5)
    ranked = ask("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    [classified] = ask("/v1/classify", input=QUERY)["data"]
    alone = score(models.cross_encoder, bert().encode(QUERY).ids, 1 << 20)
    assert classified["probs"] == pytest.approx([alone], abs=1e-5)
