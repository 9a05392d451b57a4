"""Bad requests get their error, hostile ones their answer, and neither harms those beside them:
through run-batch and over HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.pipeline.conftest import RunHere
from tests.pipeline.results import answers, examples, read_results, text_of
from tests.support import http_calls
from tests.support.bad_request import ANSWERED, CHAT, COMPLETIONS, BadRequest, as_json, message
from tests.support.bad_requests import BAD_REQUESTS, HOSTILE_BUT_GOOD, NOT_JSON
from tests.support.commands import RunningCommand, run_pipeline, running_pipeline
from tests.support.waiting import wait_until

GOOD = 20


def hostile() -> list[BadRequest]:
    """The requests that look like attacks, as if they were bad ones."""
    named = HOSTILE_BUT_GOOD.items()
    return [
        BadRequest(name, CHAT if "messages" in body else COMPLETIONS, as_json(body), None, None, "")
        for name, body in named
    ]


def check_error(case: BadRequest, status: int, body: dict[str, Any]) -> None:
    """The status, and an error in OpenAI's shape that names what is wrong in a readable way."""
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, case.name
    kind = "invalid_request_error"
    assert (status, error["type"], error["param"], error["code"]) == (case.status, kind, case.param, case.code), (
        case.name,
        error,
    )
    assert case.words in error["message"], (case.name, error)
    assert len(error["message"]) < 500, case.name


@pytest.mark.proof
def test_each_bad_line_gets_its_error_and_the_others_their_answers(tmp_path: Path) -> None:
    source, output = examples(tmp_path / "requests.jsonl", GOOD), tmp_path / "out.jsonl"
    good, expected = source.read_bytes().splitlines(), answers()
    bad = [case for case in BAD_REQUESTS if case.in_file is None]
    others = [case.line for case in (*bad, *hostile())]
    share = len(others) // GOOD + 1
    lines = [line for number in range(GOOD) for line in (*others[number * share : (number + 1) * share], good[number])]
    source.write_bytes(b"\n".join(lines))
    done = run_pipeline("run-batch", source, "-o", output)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    rows = {row["custom_id"]: row for row in read_results(output)}
    assert len(rows) == len(lines)
    for case in bad:
        row = rows.pop(case.name)
        check_error(case, row["response"]["status_code"], row["response"]["body"])
        assert row["error"] == {
            "code": case.code or "invalid_request_error",
            "message": row["response"]["body"]["error"]["message"],
        }
    for case in hostile():
        row = rows.pop(case.name)
        assert (row["response"]["status_code"], row["error"]) == (200, None), row
    assert len(rows) == GOOD
    assert {name: text_of(row) for name, row in rows.items()} == {name: expected[name] for name in rows}


def test_a_file_is_refused_for_each_line_that_cannot_be_in_a_file(tmp_path: Path, run_here: RunHere) -> None:
    source, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    cases = [(case.line, case.in_file) for case in BAD_REQUESTS if case.in_file not in (None, ANSWERED)]
    cases += [
        (BadRequest(name, CHAT, body, None, None, "").line, "invalid_json_line") for name, body in NOT_JSON.items()
    ]
    source.write_bytes(b"\n".join(line for line, _ in cases))
    done = run_here("run-batch", source, "-o", output)
    assert done.code == 2
    for number, (line, code) in enumerate(cases, start=1):
        found = [text for text in done.err.splitlines() if text.startswith(f"{source}:{number}: ")]
        assert len(found) == 1, (number, line[:200])
        assert f"[{code}]" in found[0], (found, line[:200])
        assert len(found[0]) < 1000
    assert not output.exists()


@pytest.mark.proof
def test_a_chat_template_that_fails_or_loops_ends_one_request(tmp_path: Path) -> None:
    source, output, template = tmp_path / "requests.jsonl", tmp_path / "out.jsonl", tmp_path / "template.jinja"
    template.write_text("""
        {%- set said = messages[0].content -%}
        {%- if said == "raise" %}{{ raise_exception("not this one") }}{% endif -%}
        {%- if said == "undefined" %}{{ messages[7].content.nothing }}{% endif -%}
        {%- if said == "escape" %}{{ said.__class__.__mro__ }}{% endif -%}
        {%- if said == "long" %}{{ "word " * 2000000 }}{% endif -%}
        {%- if said == "loop" -%}
          {% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
        {%- endif -%}
        {{- said -}}
    """)
    errors = {
        "raise": ("invalid_value", "not this one"),
        "undefined": ("invalid_value", "cannot render"),
        "escape": ("invalid_value", "cannot render"),
        "long": ("context_length_exceeded", "tokens"),
        "loop": ("invalid_value", "takes longer than"),
    }
    said = [text for bad in errors for text in (f"good beside {bad}", bad)]
    cases = [BadRequest(text, CHAT, as_json(message(content=text)), None, None, "") for text in said]
    source.write_bytes(b"\n".join(case.line for case in cases))
    done = run_pipeline("run-batch", source, "-o", output, "--chat-template", template)
    assert done.returncode == 0, done.stderr[-3000:]
    for row in read_results(output):
        if row["custom_id"] in errors:
            code, words = errors[row["custom_id"]]
            check_error(BadRequest(row["custom_id"], CHAT, b"", "messages", code, words), 400, row["response"]["body"])
        else:
            assert row["response"]["status_code"] == 200, row


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningCommand, str]]:
    """A running `pipeline serve` whose model is ready, and its address."""
    with running_pipeline("serve", "--port", 0, "--served-model-name", "demo") as command:
        url = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert url is not None
        command.wait_for("worker INFO ready")
        wait_until(lambda: http_calls.get(f"{url[1]}/health").json().get("models"), 60, "the model to be served")
        yield command, url[1]


@pytest.mark.proof
def test_each_bad_call_gets_its_status_and_the_others_their_answers(
    served: tuple[RunningCommand, str], tmp_path: Path
) -> None:
    command, url = served
    expected = answers()
    good = [json.loads(line) for line in examples(tmp_path / "requests.jsonl", GOOD).read_bytes().splitlines()]
    with (
        httpx.Client(base_url=url, timeout=120) as http,
        ThreadPoolExecutor(6) as beside,
        ThreadPoolExecutor(2) as threads,
    ):

        def post(endpoint: str, body: bytes) -> httpx.Response:
            return http.post(endpoint, content=body, headers={"content-type": "application/json"})

        running = [beside.submit(post, row["url"], as_json(row["body"])) for row in good]
        refused = [(case, threads.submit(post, case.endpoint, case.body)) for case in BAD_REQUESTS]
        for_model = [case for case in BAD_REQUESTS if case.needs_model and b"prompt_logprobs" not in case.body]
        refused += [
            (case, threads.submit(post, case.endpoint, case.body[:-1] + b', "stream": true}')) for case in for_model
        ]
        no_json = [(name, threads.submit(post, CHAT, body)) for name, body in NOT_JSON.items()]
        answered = [(case, threads.submit(post, case.endpoint, case.body)) for case in hostile()]
        for case, call in refused:
            check_error(case, call.result().status_code, call.result().json())
        for name, call in no_json:
            case = BadRequest(name, CHAT, b"", None, None, "could not parse the JSON body")
            check_error(case, call.result().status_code, call.result().json())
        for case, call in answered:
            assert call.result().status_code == 200, (case.name, call.result().text)
        for row, call in zip(good, running, strict=True):
            assert call.result().json()["choices"][0]["message"]["content"] == expected[row["custom_id"]]
    assert "Traceback" not in command.output
