"""The client against a server: batches, `map`, tokens, frames and vLLM's call shapes."""

import asyncio
import json
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import openai
import pandas
import polars
import pyarrow
import pytest

from batch_inference_pipeline import (
    AsyncPipeline,
    BatchFailed,
    ClientError,
    Pipeline,
    RequestFailed,
    Rows,
    SamplingParams,
    lines,
)
from batch_inference_pipeline.lines import LineOptions, spool
from batch_inference_pipeline.local_server import flags_of_options
from batch_inference_pipeline.map_run import MapRun
from batch_inference_pipeline.results import InputOrder, RequestResult, TokenDeltas
from tests.batch_inference_pipeline.conftest import ClientServer
from tests.pipeline.results import answers, custom_ids, examples
from tests.support.processes import send_all
from tests.support.relay import Relay
from tests.support.waiting import wait_for_value, wait_until
from tests.test_layout import import_of, loaded_by

TOO_LONG = "Count " * 5000
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


def counting(numbers: int) -> tuple[list[str], list[str]]:
    """Prompts, and the demo model's right answers."""
    spans = [range(2 + n % 7, 5 + n % 7) for n in range(numbers)]
    prompts = [f"Count from {span[0]} to {span[-1]}." for span in spans]
    return prompts, [f"Count: {', '.join(map(str, span))}" for span in spans]


def test_the_import_is_cheap() -> None:
    unwanted = ("torch", "transformers", "pydantic", "openai", "pyarrow", "redis")
    assert not loaded_by(import_of("batch_inference_pipeline"), *unwanted)


def test_map_needs_no_official_client(client_server: ClientServer) -> None:
    program = f"""
import sys
from batch_inference_pipeline import Pipeline
with Pipeline(base_url={client_server.base_url!r}) as p:
    assert [one.text for one in p.map(["Count from 2 to 4."], temperature=0)] == ["Count: 2, 3, 4"]
loaded = sys.modules
"""
    assert loaded_by(program, "httpx2", "openai") == "httpx2"


def test_map_gives_results_in_the_order_of_the_input(p: Pipeline) -> None:
    prompts, expected = counting(40)
    assert [result.text for result in p.map(prompts, temperature=0)] == expected
    assert [result.text for result in p.map((text for text in prompts), temperature=0, chunksize=16)] == expected
    unordered = list(p.map(prompts, temperature=0, ordered=False))
    assert sorted(result.custom_id for result in unordered) == sorted(f"request-{n}" for n in range(40))
    assert list(p.map([])) == []


def test_map_takes_conversations_bodies_and_lines(p: Pipeline) -> None:
    messages = [{"role": "user", "content": "Count from 2 to 4."}]
    line = {"custom_id": "named", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}}
    results = list(p.map([messages, {"messages": messages}, line], temperature=0))
    assert [result.text for result in results] == ["Count: 2, 3, 4"] * 3
    assert results[2].custom_id == "named"


def test_map_raises_in_the_place_of_a_failed_request_or_returns_it(p: Pipeline) -> None:
    prompts = ["Count from 2 to 4.", TOO_LONG, "Count from 3 to 5."]
    found = p.map(prompts, temperature=0)
    assert next(found).text == "Count: 2, 3, 4"
    with pytest.raises(RequestFailed, match="request-1 has no answer"):
        next(found)
    assert list(found) == []
    first, failed, last = p.map(prompts, temperature=0, return_errors=True)
    assert (first.text, last.text) == ("Count: 2, 3, 4", "Count: 3, 4, 5")
    assert failed.error is not None
    with pytest.raises(RequestFailed):
        print(failed.text)


def test_a_map_that_is_left_or_takes_too_long_is_cancelled(p: Pipeline, client_server: ClientServer) -> None:
    client = openai.OpenAI(base_url=client_server.base_url, api_key="none")
    long = [f"Count {n}" for n in range(200)]
    short = {"messages": [{"role": "user", "content": "Count from 2 to 4."}], "max_tokens": 1}
    before = {batch.id for batch in client.batches.list()}

    def left() -> set[str]:
        return {batch.id for batch in client.batches.list()} - before

    # As few as run at once: the short one, which the plan has last, is not to wait for long ones
    with closing(p.map([short, *long[:40]], ordered=False, **ENDLESS)) as found:
        next(found)
    for seconds in (1, 4, 16, 64):  # a slow machine has no batch yet after the first of them
        with pytest.raises(TimeoutError):
            list(p.map(long, timeout=seconds, **ENDLESS))
        if len(left()) >= 2:
            break
    with Pipeline(base_url=client_server.base_url) as other:
        other.map(long, **ENDLESS)
    wait_until(
        lambda: all(client.batches.retrieve(one).status in ("cancelled", "completed") for one in left()), 60, "the ends"
    )
    assert len(left()) >= 3
    assert {client.batches.retrieve(one).status for one in left()} == {"cancelled"}


def test_closing_cancels_the_batches_of_every_map(client_server: ClientServer) -> None:
    client = openai.OpenAI(base_url=client_server.base_url, api_key="none")
    with Pipeline(base_url=client_server.base_url) as p:
        maps = [p.map(LONG, **ENDLESS) for _ in range(8)]
        left = [batch.id for batch in client.batches.list(limit=8).data]
    del maps
    wait_for_value(lambda: [client.batches.retrieve(one).status for one in left], ["cancelled"] * 8, 60, "the ends")


LONG = [f"Count {n}" for n in range(200)]


@pytest.mark.parametrize(
    ("begin", "error"),
    [
        (lambda p, seconds: p.map(LONG, timeout=seconds, **ENDLESS), TimeoutError),
        (lambda p, _: p.submit(LONG, **ENDLESS), KeyboardInterrupt),
        (lambda p, _: p.open(), KeyboardInterrupt),
    ],
    ids=["map", "submit", "open"],
)
def test_a_batch_whose_creation_is_left_is_cancelled(
    client_server: ClientServer, begin: Callable[[Pipeline, float], object], error: type[BaseException]
) -> None:
    client = openai.OpenAI(base_url=client_server.base_url, api_key="none")
    batches = {batch.id for batch in client.batches.list()}
    with Relay(client_server.base_url) as relay, Pipeline(base_url=relay.url) as p:
        assert p.model == "demo"
        relay.held_from = b"POST /v1/batches "

        def made() -> set[str]:
            return {batch.id for batch in client.batches.list()} - batches

        def interrupt() -> None:
            wait_until(made, 60, "the batch")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt if error is KeyboardInterrupt else made)
        interrupting.start()
        for seconds in (2, 8, 32):  # a slow machine has no batch yet after the first of them
            with pytest.raises(error):
                begin(p, seconds)
            if made():
                break
        interrupting.join()
        created = made()
        assert created
        relay.held_from = None
        relay.replies.set()
        for batch in created:
            # One whose input went before the server had taken it is refused
            wait_until(
                lambda batch=batch: client.batches.retrieve(batch).status in ("cancelled", "failed"), 60, "an end"
            )
        found = [client.batches.retrieve(batch) for batch in created]
        assert all(batch.status == "cancelled" or batch.in_progress_at is None for batch in found)
        assert error is TimeoutError or {batch.status for batch in found} == {"cancelled"}
        inputs = {batch.input_file_id for batch in found}
        wait_until(
            lambda: inputs.isdisjoint(file.id for file in client.files.list(purpose="batch")), 60, "its input to go"
        )


def test_bad_input_is_refused_with_a_sentence(p: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no request to submit"):
        p.submit([])
    with pytest.raises(ValueError, match="request 1 is 5: give a text"):
        p.submit(["Count", 5])
    source = examples(tmp_path / "in.jsonl", 2)
    with pytest.raises(ValueError, match=r"'max_tokens' cannot be given for the file .*in.jsonl"):
        p.submit(source, max_tokens=4)
    with pytest.raises(ValueError, match="'model' cannot be given"):
        p.submit(str(source), model="demo")
    with pytest.raises(FileNotFoundError):
        p.submit(tmp_path / "none.jsonl")
    for alone in ("Count", b"Count", {"messages": []}, source):
        with pytest.raises(TypeError, match="is not a list of requests: use"):
            p.map(alone)
    with pytest.raises(TypeError, match="is not a list of requests"):
        p.submit({"messages": []})
    line = {"custom_id": "same", "body": {"messages": [{"role": "user", "content": "Count"}]}}
    with pytest.raises(BatchFailed, match="was refused in line 2"):
        list(p.submit([line, line]).results())
    with pytest.raises(openai.NotFoundError):
        list(p.batch("batch_unknown").results())
    with pytest.raises(ValueError, match="cannot be used with base_url"):
        Pipeline(base_url=p.base_url, max_num_seqs=8)
    for name in ("host", "port", "uds", "ssl_certfile"):
        with pytest.raises(ValueError, match=f"'{name}' cannot be given"):
            Pipeline(**{name: "x"})
    with pytest.raises(ValueError, match="redis_url and file_store"):
        Pipeline(redis_url="redis://localhost")
    with pytest.raises(TypeError, match="'hotness' is no parameter"):
        SamplingParams(hotness=1)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        p.generate("Hello", [SamplingParams(), SamplingParams()])


def test_a_result_that_does_not_come_is_an_error(client_server: ClientServer) -> None:
    async def work() -> None:
        async with AsyncPipeline(base_url=client_server.base_url) as p:
            chunk = next(spool(["Count from 2 to 4."], await p.connection.line_options(None, None, {})))
            chunk.custom_ids.append("request-1")
            run = MapRun(p.connection, [chunk], ordered=True, deadline=None)
            await run.begin()
            with pytest.raises(ClientError, match="ended without 1 of its results, such as request-1"):
                [page async for page in run.groups(return_errors=False)]

    asyncio.run(work())


def test_a_closed_client_says_so(client_server: ClientServer) -> None:
    pipeline = Pipeline(base_url=client_server.base_url)
    found = pipeline.map(counting(3)[0])
    pipeline.close()
    pipeline.close()
    with pytest.raises(ClientError, match="the client is closed"):
        next(found)
    with pytest.raises(ClientError, match="the client is not open"):
        print(AsyncPipeline(base_url=client_server.base_url).client)


def test_a_file_is_submitted_and_its_results_come_once(p: Pipeline, tmp_path: Path) -> None:
    source = examples(tmp_path / "in.jsonl", 60)
    handle = p.submit(source, metadata={"team": "blue"})
    assert sorted(result.custom_id for result in handle.results()) == sorted(custom_ids(source))
    assert handle.status == "completed"
    assert handle.retrieve().metadata == {"team": "blue"}
    expected = answers()
    again = {result.custom_id: result for result in p.batch(handle.id).results()}
    assert all(again[name].text == expected[name] for name in again if name in expected)


def test_every_result_comes_once_while_the_api_is_killed(p: Pipeline, client_server: ClientServer) -> None:
    prompts = [f"Count {n}" for n in range(80)]
    found = p.map(prompts, ordered=False, max_tokens=300, ignore_eos=True)
    names = [next(found).custom_id]
    send_all(client_server.api_processes(), signal.SIGKILL)
    names += [result.custom_id for result in found]
    assert sorted(names) == sorted(f"request-{n}" for n in range(80))


def test_tokens_add_up_to_the_answers_while_the_api_is_killed(p: Pipeline, client_server: ClientServer) -> None:
    handle = p.submit([f"Count {n}" for n in range(20)], max_tokens=1500, ignore_eos=True)
    texts: dict[str, str] = {}
    killed = False
    for delta in handle.tokens():
        assert delta.custom_id is not None
        texts[delta.custom_id] = texts.get(delta.custom_id, "") + delta.text
        if not killed and len(texts) > 3:
            send_all(client_server.api_processes(), signal.SIGKILL)
            killed = True
    results = {result.custom_id: result.text for result in handle.results()}
    assert killed
    assert len(results) == 20
    # What ended while nothing could be read has no more deltas; the others are whole
    assert all(results[name].startswith(text) for name, text in texts.items())


def test_a_batch_is_cancelled(p: Pipeline) -> None:
    handle = p.submit([f"Count {n}" for n in range(200)], **ENDLESS)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.1)
    # One that is cancelled before its input was read has no lines
    wait_until(lambda: handle.status == "in_progress", 60, "its lines")
    handle.cancel()
    assert handle.wait().status == "cancelled"
    results = list(handle.results())
    assert len({result.custom_id for result in results}) == len(results) == 200
    assert any(result.error is not None for result in results)


def test_requests_are_appended_to_an_open_batch(p: Pipeline) -> None:
    handle = p.open()
    assert handle.append(["Count from 2 to 4."], temperature=0)["appended"] == 1
    found = handle.results()
    assert next(found).text == "Count: 2, 3, 4"
    named = {"custom_id": "named", "body": {"messages": [{"role": "user", "content": "Count from 3 to 5."}]}}
    assert handle.append([named, "Count from 4 to 6."], temperature=0)["appended"] == 2
    assert handle.append([named], temperature=0)["repeated"] == 1
    with pytest.raises(TypeError, match="'Count' is not a list of requests"):
        handle.append("Count")
    with pytest.raises(ValueError, match="no request to append"):
        handle.append([])
    handle.close()
    assert sorted(result.text for result in found) == ["Count: 3, 4, 5", "Count: 4, 5, 6"]
    with pytest.raises(openai.ConflictError):
        handle.append(["Count"])


def test_a_live_call_is_a_future(p: Pipeline) -> None:
    calls = [p.submit_one("Count from 2 to 4.", temperature=0), p.submit_one(TOO_LONG)]
    assert calls[0].result().text == "Count: 2, 3, 4"
    assert isinstance(calls[1].exception(), openai.BadRequestError)


def test_the_call_shapes_of_vllm(p: Pipeline) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, return_token_ids=True)
    first, second = p.generate(["Hello", [42, 420, 81]], params)
    assert (first.prompt, second.prompt) == ("Hello", None)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.outputs[0].text == second.outputs[0].text
    assert len(first.outputs[0].token_ids or ()) == 4
    assert first.outputs[0].finish_reason == "length"
    assert first.finished
    conversation = [{"role": "user", "content": "Count from 2 to 4."}]
    [alone] = p.chat(conversation, SamplingParams(temperature=0, max_tokens=20, logprobs=2))
    assert alone.outputs[0].text == "Count: 2, 3, 4"
    assert len((alone.outputs[0].logprobs or {})["content"][0]["top_logprobs"]) == 2
    each = [SamplingParams(temperature=0, max_tokens=1), SamplingParams(temperature=0, max_tokens=20)]
    short, long = p.chat([conversation, conversation], each)
    assert len(short.outputs[0].text) < len(long.outputs[0].text)
    assert len(p.generate({"prompt": "Hello"})) == 1
    with pytest.raises(openai.BadRequestError):
        p.submit_one({"input": "Hello"}).result()  # the demo model gives no embeddings


TEXTS = {"text": ["2 to 4", "3 to 5"], "label": [1, 2]}


@pytest.mark.parametrize(
    "frame",
    [
        pandas.DataFrame(TEXTS, index=["a", "b"]),
        polars.DataFrame(TEXTS),
        pyarrow.table(TEXTS),
        datasets.Dataset.from_dict(TEXTS),
    ],
    ids=["pandas", "polars", "pyarrow", "datasets"],
)
def test_a_frame_gets_a_column_of_answers(p: Pipeline, frame: Any) -> None:
    made = p.map_frame(frame, Rows(template="Count from {text}."), column="said", temperature=0, return_errors=True)
    assert type(made) is type(frame)
    assert list(made["said"]) == ["Count: 2, 3, 4", "Count: 3, 4, 5"] or made["said"].to_pylist() == [
        "Count: 2, 3, 4",
        "Count: 3, 4, 5",
    ]
    assert len(made["said_error"]) == 2
    with pytest.raises(ValueError, match="the frame has no column prompt; it has: text, label"):
        p.map_frame(frame, Rows(prompt_column="prompt"))
    with pytest.raises(ValueError, match="a frame needs 'rows'"):
        p.submit(frame)


@pytest.mark.parametrize(
    "column",
    [
        pandas.Series(["Count from 2 to 4."]),
        polars.Series(["Count from 2 to 4."]),
        datasets.Dataset.from_dict({"text": ["Count from 2 to 4."]})["text"],
    ],
    ids=["pandas", "polars", "datasets"],
)
def test_a_column_is_a_list_of_prompts(p: Pipeline, column: Any) -> None:
    assert [result.text for result in p.map(column, temperature=0)] == ["Count: 2, 3, 4"]


def test_the_same_with_asyncio(client_server: ClientServer, tmp_path: Path) -> None:
    prompts, expected = counting(20)
    source = examples(tmp_path / "in.jsonl", 5)

    async def work() -> None:
        async with AsyncPipeline(base_url=client_server.base_url) as p:
            first = [one.text async for one in p.map(prompts, temperature=0)]
            assert first == expected
            handle = await p.submit(source)
            names = [one.custom_id async for one in handle.results()]
            assert sorted(names) == sorted(custom_ids(source))
            assert (await handle.wait()).status == await handle.status() == "completed"
            deltas = [one async for one in (await p.submit(prompts[:2])).tokens()]
            assert {one.custom_id for one in deltas} <= {"request-0", "request-1"}
            assert (await p.submit_one(prompts[0], temperature=0)).text == expected[0]
            [said] = await p.chat(
                [{"role": "user", "content": prompts[0]}], SamplingParams(temperature=0, max_tokens=20)
            )
            assert said.outputs[0].text == expected[0]
            opened = await p.open()
            await opened.append(prompts[:3])
            await opened.close()
            assert len([one async for one in opened.results()]) == 3

    asyncio.run(work())


def test_text_that_comes_twice_counts_once() -> None:
    deltas = TokenDeltas()

    def event(offset: int, text: str, status: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "token_offset": 0, "text": text, "text_offset": offset}
        return {"custom_id": "a", "line": 1, "choices": [choice], "status": status}

    said = [event(0, "one"), event(0, "one two"), event(3, " two"), event(7, " three", "completed")]
    found = [delta for one in said for delta in deltas.add(one)]
    assert "".join(delta.text for delta in found) == "one two three"
    assert found[-1].status == "completed"


def test_a_failure_comes_through_a_process_pool() -> None:
    failed = RequestFailed(RequestResult(custom_id="a", error={"code": "too_long", "message": "It is too long."}))
    copy = pickle.loads(pickle.dumps(failed))
    assert (str(copy), copy.result) == (str(failed), failed.result)
    assert "(too_long): It is too long." in str(copy)


def test_results_are_put_in_order() -> None:
    order = InputOrder(["a", "b", "c"])
    a, b, c = (RequestResult(custom_id=name) for name in "abc")
    assert [order.add([c, b]), order.add([a])] == [[], [a, b, c]]


def test_the_input_is_read_piece_by_piece() -> None:
    taken = []

    def prompts() -> Iterator[str]:
        for number in range(6):
            taken.append(number)
            yield str(number)

    pieces = spool(prompts(), LineOptions("demo"), 2)
    first = next(pieces)
    assert taken == [0, 1]
    assert [*first.custom_ids, *next(pieces).custom_ids] == [f"request-{n}" for n in range(4)]
    with first.file as file:
        file.seek(0)
        assert json.loads(file.readline())["body"]["model"] == "demo"


def test_a_batch_of_map_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "CHUNK_BYTES", 2000)
    found = list(lines.spool(["Count" * 100] * 10, LineOptions("demo"), 50_000))
    assert [len(one.custom_ids) for one in found] == [4, 4, 2]
    [whole] = lines.spool(["Count" * 100] * 10, LineOptions("demo"))
    assert len(whole.custom_ids) == 10
    for one in (*found, whole):
        one.file.close()


def test_options_are_flags() -> None:
    assert flags_of_options({"max_num_seqs": 8, "insecure": True, "deduplicate": False, "tracing": None}) == [
        "--max-num-seqs",
        "8",
        "--insecure",
        "--no-deduplicate",
    ]
