"""Requests for numbers: what the engine gets of them, what they are answered, and what the next
worker makes of them; over a real queue, without a model.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jobs.protocol.pooling_parameters import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE
from jobs.protocol.requests import Claim, Delta, Finished, Request, RequestKey
from jobs.queue.request_queue import Queue
from jobs.queue.streams import ControlMessage
from jobs.tracing import Tracing
from tests.support.requests import read_api
from tests.support.scripted_engine import CACHED_TOKENS, ScriptedEngine
from tests.support.small_tokenizers import bert, write_folder
from workers.engine.messages.core import PoolingParams, Ready
from workers.replica.duplicates import prepare_once
from workers.replica.grammars import Grammars
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.pooling_preparation import PoolingPreparation, prepare_each
from workers.replica.preparation import Preparation
from workers.replica.running import Running
from workers.replica.sampling_params import ModelLimits
from workers.replica.tracing import RequestTraces
from workers.text.sentence_files import SentenceFiles
from workers.text.tokenizer import TextTokenizer

READY: dict[str, Any] = {
    "max_model_len": 12,
    "num_blocks": 8,
    "block_size": 16,
    "vocab_size": 100,
    "eos_token_ids": [],
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "depth": 0,
    "threads": 1,
    "weights_seconds": 0.0,
}
EMBED = Ready(**READY, tasks=["embed", "token_embed"], embedding_size=3, matryoshka=[2])
SCORES = Ready(**READY, tasks=["classify", "score"], labels=["good"])
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = write_folder(tmp_path_factory.mktemp("bert"), bert(), {"cls_token": "[CLS]", "sep_token": "[SEP]"})
    return TextTokenizer.load(str(folder))


@pytest.fixture
def ids(tokenizer: TextTokenizer) -> Any:
    return lambda text: tokenizer.encode([text], special_tokens=False)[0]


def claim_of(url: str, **body: Any) -> Claim:
    request = Request(url, "m", json.dumps({"model": "m", **body}).encode(), seed=1)
    return Claim(RequestKey("live_0", 0), 7, request, None, 1, True)


def prepared(
    tokenizer: TextTokenizer, url: str, info: Ready = EMBED, files: SentenceFiles | None = None, **body: Any
) -> PreparedPooling:
    preparation = PoolingPreparation(tokenizer, ["m"], info, files or SentenceFiles())
    found, errors = preparation.prepare([claim_of(url, **body)])
    assert errors == []
    return found[0]


def tokens_of(*args: Any, **options: Any) -> list[list[int]]:
    return [one.token_ids for one in prepared(*args, **options).inputs]


def error_of(tokenizer: TextTokenizer, url: str, info: Ready = EMBED, **body: Any) -> dict[str, Any]:
    found, errors = PoolingPreparation(tokenizer, ["m"], info, SentenceFiles()).prepare([claim_of(url, **body)])
    assert found == []
    assert errors[0].result.status == 400
    error: dict[str, Any] = json.loads(errors[0].result.body)["error"]
    return error


def test_texts_have_the_tokens_that_the_model_expects(tokenizer: TextTokenizer, ids: Any) -> None:
    quick, fox = ids("quick"), ids("fox")
    assert tokens_of(tokenizer, EMBEDDINGS, input=["Quick", "fox"]) == [[CLS, *quick, SEP], [CLS, *fox, SEP]]
    assert tokens_of(tokenizer, EMBEDDINGS, input="quick", add_special_tokens=False) == [quick]
    assert tokens_of(tokenizer, EMBEDDINGS, input=[[5, 6], [7]]) == [[5, 6], [7]]
    assert tokens_of(tokenizer, EMBEDDINGS, input=[5, 6]) == [[5, 6]]


def test_a_prompt_of_the_folder_comes_first(tokenizer: TextTokenizer, tmp_path: Path, ids: Any) -> None:
    config = {"prompts": {"query": "the dog: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 6, "do_lower_case": False}))
    files = SentenceFiles.read(tmp_path)
    asked = partial(tokens_of, tokenizer, EMBEDDINGS, files=files, input="fox")
    assert asked() == [[CLS, *ids("the dog: fox"), SEP]]
    assert asked(prompt_name="document") == [[CLS, *ids("fox"), SEP]]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"include_prompt": false}')
    without = SentenceFiles.read(tmp_path)
    for given, prompt, unpooled in (
        (files, None, 0),
        (without, None, 1 + len(ids("the dog:"))),
        (without, "document", 0),
    ):
        (one,) = prepared(tokenizer, EMBEDDINGS, files=given, input="fox", prompt_name=prompt).inputs
        assert one.unpooled == unpooled
    preparation = PoolingPreparation(tokenizer, ["m"], EMBED, files)
    _, errors = preparation.prepare([claim_of(EMBEDDINGS, input="fox", prompt_name="unknown")])
    assert json.loads(errors[0].result.body)["error"]["message"] == (
        "Invalid 'prompt_name': the model has no prompt 'unknown'. It has: 'query', 'document'."
    )
    _, errors = preparation.prepare([claim_of(EMBEDDINGS, input="fox " * 3)])
    assert "maximum context length is 6 tokens" in json.loads(errors[0].result.body)["error"]["message"]


def test_what_is_cut_keeps_the_tokens_around_it(tokenizer: TextTokenizer, ids: Any) -> None:
    text = "the quick brown fox jumps over the lazy dog the quick fox"
    cut = partial(tokens_of, tokenizer, EMBEDDINGS, input=text)
    assert cut(truncate_prompt_tokens=4) == [[CLS, *ids("the quick"), SEP]]
    assert cut(truncate_prompt_tokens=4, truncation_side="left") == [[CLS, *ids("quick fox"), SEP]]
    assert cut(truncate_prompt_tokens=-1) == [[CLS, *ids(text)[:10], SEP]]
    assert tokens_of(tokenizer, EMBEDDINGS, input="fox " * 100_000, truncate_prompt_tokens=4) == [
        [CLS, *ids("fox fox"), SEP]
    ]
    assert tokens_of(tokenizer, EMBEDDINGS, input=[5, 6, 7], truncate_prompt_tokens=2) == [[5, 6]]


def test_pairs_are_one_input_with_two_texts(tokenizer: TextTokenizer, ids: Any) -> None:
    item = prepared(tokenizer, RERANK, SCORES, query="quick fox", documents=["dog", "the lazy dog"])
    first, second = item.inputs
    assert first.token_ids == [CLS, *ids("quick fox"), SEP, *ids("dog"), SEP]
    assert (first.second_text, second.second_text) == (4, 4)
    assert item.pooling == PoolingParams("classify")
    long = {"queries": "the quick brown fox jumps over", "documents": "the lazy dog"}
    item = prepared(tokenizer, SCORE, SCORES, truncate_prompt_tokens=8, **long)
    assert item.inputs[0].token_ids == [CLS, *ids("the quick brown"), SEP, *ids("the lazy"), SEP]
    error = error_of(tokenizer, SCORE, SCORES, queries="the quick fox", documents=["fox", "fox " * 8])
    assert (error["param"], error["code"]) == ("documents[1]", "context_length_exceeded")


@pytest.mark.parametrize(
    ("url", "info", "body", "param", "message"),
    [
        (EMBEDDINGS, EMBED, {"input": ["fox", "fox " * 11]}, "input[1]", "your input[1] resulted in 13 tokens"),
        (EMBEDDINGS, EMBED, {"input": "fox " * 1000}, "input", "resulted in more than 12 tokens"),
        (EMBEDDINGS, EMBED, {"input": [5, 100]}, "input[1]", "Expected a token id <= 99"),
        (EMBEDDINGS, EMBED, {"input": " ", "add_special_tokens": False}, "input", "the text has no tokens"),
        (EMBEDDINGS, EMBED, {"input": "fox", "dimensions": 4}, "dimensions", "can have 2, 3, but not 4"),
        (EMBEDDINGS, SCORES, {"input": "fox"}, "model", "It answers: /v1/score, /v1/rerank, /v1/classify, /v1/pooling"),
        (CLASSIFY, EMBED, {"input": "fox"}, "model", "It answers: /v1/embeddings, /v1/score"),
        (POOLING, EMBED, {"input": "fox", "task": "classify"}, "task", "It does: 'embed', 'token_embed'."),
        (POOLING, SCORES, {"input": "fox", "dimensions": 2}, "dimensions", "it is for embeddings"),
    ],
)
def test_bad_input_is_one_sentence(
    tokenizer: TextTokenizer, url: str, info: Ready, body: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(tokenizer, url, info, **body)
    assert error["param"] == param
    assert message in error["message"]


def test_an_answer_has_bounds(tokenizer: TextTokenizer) -> None:
    wide = Ready(**READY, tasks=["embed", "token_embed"], embedding_size=1 << 20)
    assert len(prepared(tokenizer, EMBEDDINGS, wide, input=["fox"] * 8).inputs) == 8
    error = error_of(tokenizer, POOLING, wide, input=["fox"] * 8, task="token_embed")
    assert "the answer would have 25165824 numbers, of at most 8388608" in error["message"]
    assert len(prepared(tokenizer, RERANK, wide, query="fox", documents=["fox"] * 8).inputs) == 9


class PoolingBench:
    """A worker's middle: requests come from the queue and go back there; the engine is scripted."""

    def __init__(self, queue: Queue, tokenizer: TextTokenizer, info: Ready = EMBED, worker: str = "w1") -> None:
        self.queue = queue
        self.worker = worker
        self.engine = ScriptedEngine(lambda prompt, sampling: [])
        self.running = Running(self.engine, self, Grammars(self), lambda: 100.0, 2.0)
        self.results: list[Finished] = []
        texts = Preparation(tokenizer, ["m"], ModelLimits(12, 100, tasks=tuple(info.tasks)))
        numbers = PoolingPreparation(tokenizer, ["m"], info, SentenceFiles())
        self._prepare = partial(prepare_once, partial(prepare_each, texts, numbers), self.running.prepared, None)
        self._seq = 0

    def accept_later(self, delta: Delta) -> None:
        assert self.queue.publish(self.worker, [delta]) == []

    def finish(self, finished: Finished) -> None:
        self.results.append(finished)
        self.queue.commit(self.worker, [finished])

    def claim(self) -> list[Claim]:
        self._seq += 1
        claims = self.queue.claim(self.worker, self._seq, 10, models=["m"])
        found, errors = self._prepare(claims)
        self.running.start(found)
        self.running.reject(errors)
        return claims

    def step(self, most: int = 100) -> None:
        """Pool at most so many of the inputs."""
        left = iter(range(most))
        self.running.on_step(self.engine.step(lambda request: next(left, None) is not None))

    def answer(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.results[-1].result.body)
        return body


def submit(queue: Queue, url: str = EMBEDDINGS, name: str = "a", **body: Any) -> RequestKey:
    raw = json.dumps({"model": "m", **body}).encode()
    queue.submit(f"live_{name}", Request(url, "m", raw, seed=1, reply_to=name))
    return RequestKey(f"live_{name}", 0)


@pytest.fixture
def bench(queue: Queue, tokenizer: TextTokenizer) -> PoolingBench:
    return PoolingBench(queue, tokenizer)


def test_inputs_are_answered_in_their_order(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, input=["fox", "the quick fox", "dog"])
    bench.claim()
    assert [(entry.accepted, entry.result) for _, entry in read_api(queue, "a")] == [(True, None)]
    bench.step(2)
    assert (bench.results, bench.running.num_sequences, list(bench.running.due(False))) == ([], 1, [])
    bench.step()
    assert [item["embedding"] for item in bench.answer()["data"]] == [[3, CLS, 0], [5, CLS, 0], [3, CLS, 0]]
    assert bench.answer()["usage"] == {"prompt_tokens": 11, "total_tokens": 11}
    usage = bench.results[0].result.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (11, 0, 3 * CACHED_TOKENS)
    assert bench.running.metrics.prompt_tokens.samples()[0][-1] == 11
    assert not bench.running.any()


def test_identical_lines_are_pooled_once(queue: Queue, tokenizer: TextTokenizer) -> None:
    async def scenario() -> None:
        bench = PoolingBench(queue, tokenizer)
        queue.create_batch("batch_a", 4, state="in_progress")
        bodies = [{"input": ["fox", "the quick fox"]}] * 3 + [{"input": ["fox", "dog"]}]
        lines = [json.dumps({"model": "m", **body}).encode() for body in bodies]
        requests = [(line, Request(EMBEDDINGS, "m", raw, seed=1)) for line, raw in enumerate(lines)]
        assert queue.ingest("batch_a", requests, 0, 4)
        bench.claim()
        assert len(bench.engine.added) == 4  # inputs of two lines
        bench.step()
        while bench.running.keys():
            await asyncio.sleep(0)
        results = [result for _, result in queue.results("batch_a")]
        first, *copies, other = [json.loads(result.body) for result in results]
        assert [copy["data"] for copy in copies] == [first["data"]] * 2 != [other["data"]] * 2
        assert [result.usage.cached_tokens for result in results] == [2 * CACHED_TOKENS, 8, 8, 2 * CACHED_TOKENS]
        assert len({result.request_id for result in results}) == 4

    asyncio.run(scenario())


def test_the_next_worker_begins_anew(queue: Queue, tokenizer: TextTokenizer, bench: PoolingBench) -> None:
    submit(queue, input=["fox", "dog"], encoding_format="base64")
    bench.claim()
    bench.step(1)
    assert bench.running.checkpoint(bench.running.keys()) == []
    queue.requeue("w1", bench.running.drop(bench.running.keys()))
    assert bench.engine.running == {}
    other = PoolingBench(queue, tokenizer, worker="w2")
    other.claim()
    assert len(other.engine.running) == 2
    other.step()
    decoded = [struct.unpack("<3f", base64.b64decode(item["embedding"])) for item in other.answer()["data"]]
    assert decoded == [(3, CLS, 0), (3, CLS, 0)]


def test_a_cancelled_request_leaves_the_engine(queue: Queue, bench: PoolingBench) -> None:
    key = submit(queue, input=["fox", "dog"])
    bench.claim()
    bench.step(1)
    held = bench.running.cancel(ControlMessage("0-1", "cancel", keys=[key]))
    assert [one for one, _ in held] == [key]
    assert (bench.engine.running, bench.running.any(), bench.results) == ({}, False, [])


def test_a_request_in_isolation_is_harmless_when_it_has_ended(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, input=["fox", "dog"])
    bench.claim()
    bench.step(1)
    assert not bench.running.all_have(8)
    assert bench.running.tokens_left() == {RequestKey("live_a", 0): 1}
    bench.step()
    assert bench.running.all_have(8)


def test_a_failed_input_ends_the_whole_request(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, input=["fox", "dog"])
    bench.claim()
    bench.engine.failing[next(iter(bench.engine.running))] = "it did not work"
    bench.step()
    assert bench.results[0].result.status == 500
    assert bench.answer()["error"]["message"] == "it did not work"
    assert not bench.running.any()


def test_numbers_that_are_none_are_an_error(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, input="fox")
    bench.claim()
    output = bench.engine.step()
    output.pooled = dict.fromkeys(output.pooled, struct.pack("<f", float("nan")))
    bench.running.on_step(output)
    assert bench.results[0].result.status == 500
    assert "not a finite number" in bench.answer()["error"]["message"]


def test_numbers_beyond_the_type_that_was_asked_for_are_a_bad_request(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, input=["fox", "dog"], embed_dtype="float16")
    bench.claim()
    output = bench.engine.step()
    output.pooled = dict.fromkeys(output.pooled, struct.pack("<f", 1e5))
    bench.running.on_step(output)
    assert [(one.result.status, bench.answer()["error"]["param"]) for one in bench.results] == [(400, "embed_dtype")]
    assert not bench.running.any()


def test_texts_are_scored_by_their_embeddings(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, SCORE, queries="fox", documents=["dog", "the dog"])
    bench.claim()
    added = bench.engine.added
    assert [request.pooling for request in added] == [PoolingParams("embed", normalize=True)] * 3
    bench.step()
    assert [item["score"] for item in bench.answer()["data"]] == [9 + 4, 12 + 4]


def test_a_cross_encoder_scores_pairs(queue: Queue, tokenizer: TextTokenizer) -> None:
    bench = PoolingBench(queue, tokenizer, SCORES)
    submit(queue, RERANK, query="fox", documents=["dog", "the lazy dog"])
    bench.claim()
    bench.step()
    assert [(item["index"], item["relevance_score"]) for item in bench.answer()["results"]] == [(1, 7), (0, 5)]
    submit(queue, CLASSIFY, "b", input="fox", use_activation=False)
    bench.claim()
    bench.step()
    assert bench.engine.added[-1].pooling == PoolingParams("classify", activation=False)
    assert bench.answer()["data"][0] == {"index": 0, "label": "good", "probs": [3, CLS, 0], "num_classes": 3}


def test_each_token_has_a_row(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, POOLING, input=[[5, 6], [7]], task="token_embed", dimensions=2)
    bench.claim()
    bench.step()
    assert [item["data"] for item in bench.answer()["data"]] == [[[5, 5], [6, 6]], [[7, 7]]]


def test_a_chat_is_not_for_an_embedding_model(queue: Queue, bench: PoolingBench) -> None:
    submit(queue, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    bench.claim()
    assert bench.results[0].result.status == 400
    assert bench.answer()["error"]["message"].startswith("The model `m` cannot be used with /v1/chat/completions.")


def test_the_span_of_a_request_says_how_many_inputs_and_dimensions_it_has(tokenizer: TextTokenizer) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    traces = RequestTraces(Tracing(provider), "w1")
    claim = claim_of(EMBEDDINGS, input=["fox", "dog"], dimensions=2)
    claim.request.trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    PoolingPreparation(tokenizer, ["m"], EMBED, SentenceFiles(), traces).prepare([claim])
    traces.close()
    found = [dict(span.attributes or {}) for span in spans.get_finished_spans()]
    assert any(
        one.get("pipeline.pooling.inputs") == 2 and one.get("gen_ai.embeddings.dimension.count") == 2 for one in found
    )
