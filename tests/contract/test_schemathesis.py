"""Whatever a client sends, as far as our OpenAPI document lets a machine make it up: never a 500,
and only what the document says.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.contract.calls import lines, submit, upload, wait
from tests.support.batch_stack import AWAY, BatchStack
from tests.support.control_plane import ROOT

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method,"
    "use_after_free,ensure_resource_availability"
)
SEED = 20261121
HOOKS = Path(__file__).with_name("schemathesis_hooks.py")


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_a_few_made_up_calls(stack: BatchStack, module_client: openai.OpenAI, tmp_path: Path) -> None:
    """So many, however long a busy machine takes for them."""
    assert run(stack, module_client, tmp_path, SEED, "--max-examples", "5") > 200


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_minute_of_made_up_calls(stack: BatchStack, module_client: openai.OpenAI, tmp_path: Path) -> None:
    """The same calls each time; API_SEED=n makes others."""
    assert run(stack, module_client, tmp_path, int(os.environ.get("API_SEED", SEED)), "--max-time", "60") > 200


def run(stack: BatchStack, client: openai.OpenAI, folder: Path, seed: int, *limit: str) -> int:
    """All of schemathesis' phases; what it finds is printed with a curl command and the seed.

    How many calls it made up.
    """
    program = Path(sys.executable).with_name("st")
    done = subprocess.run(
        [
            str(program),
            "run",
            f"{stack.api_url}/openapi.json",
            *limit,
            "--seed",
            str(seed),
            "--checks",
            CHECKS,
            "--continue-on-failure",
            "--request-timeout",
            "30",
            "--no-color",
            "--warnings",
            "off",
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SCHEMATHESIS_HOOKS": str(HOOKS),
            "KNOWN_IDS": json.dumps(known(client)),
        },
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, f"--seed {seed}\n{done.stdout}{done.stderr}"
    assert client.models.list().data, "the server is as well as before"
    made = re.search(r"(\d+) generated", done.stdout)
    return int(made[1]) if made is not None else 0


def known(client: openai.OpenAI) -> dict[str, list[str]]:
    """What there is to call: files with good and bad lines, batches in several states."""
    ended = [wait(client, submit(client, content).id) for content in (lines("one", "fail 400"), lines("one") + b"{\n")]
    running = [submit(client, lines("one", model=AWAY)).id for _ in range(5)]
    files = [upload(client, lines("one", "two")) for _ in range(20)]
    uploads = [
        client.uploads.create(bytes=9, filename="in.jsonl", mime_type="application/jsonl", purpose="batch")
        for _ in range(10)
    ]
    return {
        "upload": [upload.id for upload in uploads],
        "file": [*files, *(file for batch in ended for file in (batch.output_file_id, batch.error_file_id) if file)],
        "batch": [batch.id for batch in ended] + running,
        "model": ["m"],
    }
