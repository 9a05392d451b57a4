"""What the tests do with the official client over and over."""

import json
from typing import Any

import openai
from openai.types import Batch

from tests.contract.shapes import ENDED
from tests.support.control_plane import chat_line
from tests.support.waiting import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WINDOW = "24h"


def upload(client: openai.OpenAI, content: bytes, name: str = "input.jsonl") -> str:
    """The id of a batch file."""
    return client.files.create(file=(name, content), purpose="batch").id


def submit(
    client: openai.OpenAI, content: bytes, endpoint: str = CHAT, name: str = "input.jsonl", **options: Any
) -> Batch:
    """A batch of this content, as it was created."""
    options = {"completion_window": WINDOW, **options}
    return client.batches.create(input_file_id=upload(client, content, name), endpoint=endpoint, **options)


def wait(client: openai.OpenAI, batch_id: str, *states: str) -> Batch:
    """The batch once it is in one of the states, by default once it has ended."""

    def reached() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in (states or ENDED) else None

    return wait_until(reached, 60, f"{batch_id} to be {states or 'ended'}")


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file."""
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def said(line: dict[str, Any]) -> str:
    """What a result line's chat answers."""
    return line["response"]["body"]["choices"][0]["message"]["content"]


def lines(*contents: str, model: str = "m") -> bytes:
    """Chat lines c1, c2, … with these messages."""
    return b"".join(chat_line(f"c{number}", content, model) for number, content in enumerate(contents, 1))
