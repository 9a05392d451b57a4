"""`kill -9` of any process of a run-batch at random moments: every custom_id exactly once, every
answer right.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pipeline.results import check_answers, examples
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.pooling_models import embedding, save_embedder
from tests.support.processes import command_line, descendants
from tests.support.small_tokenizers import bert
from tests.support.waiting import wait_until
from workers.settings import DEMO_MODEL

LINES = 302  # the last two with a schema and with a tool
KILLS = 2
LONGEST_PAUSE = 6.0
EMBEDDINGS = 800
ROUND_SECONDS = 300

TARGETS = {
    "grammar compiler": "workers.grammars.compiler_process",
    "core": "workers.engine.core_process",
    "worker": "pipeline worker",
    "control plane": "jobs.control.rq_worker",
    "ticker": "jobs.control.ticker",
    "redis": "redis.sock",
}


def round_of(number: int) -> list[str]:
    """What is killed in a round: one of the three that the promise names, and in the fourth
    anything.
    """
    return [["core"], ["worker"], ["run-batch"], [*TARGETS, "run-batch"]][number]


@pytest.mark.proof
@pytest.mark.timeout(ROUND_SECONDS + 60)
@pytest.mark.parametrize("number", range(4))
def test_kills_at_random_moments_lose_and_repeat_nothing(tmp_path: Path, number: int) -> None:
    seed = int(os.environ.get("KILL_SEED", 1)) + number
    print(f"seed {seed} (set KILL_SEED to draw others)")
    rng = random.Random(seed)
    source, output = examples(tmp_path / "requests.jsonl", LINES), tmp_path / "out.jsonl"
    flags = (
        "run-batch",
        source,
        "-o",
        output,
        "--lease-seconds",
        2,
        "--stream-interval",
        0.2,
        "--max-num-seqs",
        rng.choice([8, 64]),
    )
    kills, deadline = 0, time.monotonic() + ROUND_SECONDS
    while not output.exists():
        assert time.monotonic() < deadline, "the round takes too long"
        with running_pipeline(*flags) as run:
            while run.process.poll() is None and kills < KILLS:
                next_kill = time.monotonic() + rng.uniform(0.0, LONGEST_PAUSE)
                while run.process.poll() is None and time.monotonic() < next_kill:
                    assert run.output is not None
                    time.sleep(0.005)
                if run.process.poll() is None:
                    kills += _kill(run, rng.choice(round_of(number)))
            code = run.wait(max(1.0, deadline - time.monotonic()))
            assert code in (0, -signal.SIGKILL), run.output
    with running_pipeline(*flags) as run:
        assert run.wait(120) == 0, run.output
    print(f"{kills} kills")
    check_answers(source, output)


@pytest.mark.proof
@pytest.mark.timeout(ROUND_SECONDS + 60)
@pytest.mark.parametrize("target", ["core", "worker", "redis", "run-batch"])
def test_kills_while_models_load_and_embed_lose_and_repeat_nothing(tmp_path: Path, target: str) -> None:
    """Once while the first model loads, and once at any time, if it is not done by then."""
    seed = int(os.environ.get("KILL_SEED", 1))
    print(f"seed {seed} (set KILL_SEED to draw others)")
    rng = random.Random(f"{seed} {target}")
    (tmp_path / "embed").mkdir()
    model = save_embedder(tmp_path / "embed")
    source, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    texts = [f"add {number} and {rng.randrange(1000)}" for number in range(EMBEDDINGS)]
    source.write_text("".join(json.dumps(line) + "\n" for line in _lines(texts)))
    models = ("--model", f"chat={DEMO_MODEL}", "--model", f"embed={tmp_path / 'embed'}", "--dtype", "float32")
    flags = ("run-batch", source, "-o", output, "--lease-seconds", 2, *models)
    kills, deadline = 0, time.monotonic() + ROUND_SECONDS
    while not output.exists():
        assert time.monotonic() < deadline, "the round takes too long"
        with running_pipeline(*flags) as run:
            if kills < KILLS:
                wait_until(
                    lambda run=run: run.process.poll() is not None or "loading the model" in run.output, 150, "a load"
                )
            while run.process.poll() is None and kills < KILLS:
                # The moment is what is drawn; the first one while a model loads, for seconds
                time.sleep(rng.uniform(0.0, LONGEST_PAUSE if kills else 0.3))
                kills += _kill(run, target)
            code = run.wait(max(1.0, deadline - time.monotonic()))
            assert code in (0, -signal.SIGKILL), run.output
    assert kills > 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [str(number) for number in range(2 * EMBEDDINGS)]
    for text, row in zip(texts, rows[::2], strict=True):
        vector = torch.tensor(row["response"]["body"]["data"][0]["embedding"])
        assert torch.allclose(vector, embedding(model, bert().encode(text).ids), atol=1e-5)
    assert {row["response"]["status_code"] for row in rows} == {200}


def _lines(texts: list[str]) -> Iterator[dict[str, Any]]:
    """Return for each text a line of the embedding model, and one of the chat model."""
    for number, text in enumerate(texts):
        bodies = {
            "/v1/embeddings": {"model": "embed", "input": text},
            "/v1/completions": {"model": "chat", "prompt": text, "max_tokens": 8},
        }
        for at, (url, body) in enumerate(bodies.items()):
            yield {"custom_id": str(2 * number + at), "method": "POST", "url": url, "body": body}


def _kill(run: RunningCommand, target: str) -> int:
    """Kills one process of that kind; returns how many it found to kill."""
    if target == "run-batch":
        run.process.kill()
        return 1
    for pid in descendants(run.process.pid):
        if TARGETS[target] in command_line(pid):
            # It has ended just now, by itself or with its parent
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return 1
    return 0
