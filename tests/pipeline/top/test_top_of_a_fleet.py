"""`pipeline top` beside a real fleet whose worker and Redis are killed."""

import json
import signal
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.support.commands import EXAMPLES, command, command_environment, run_pipeline
from tests.support.fleet import running_fleet
from tests.support.terminal import on_terminal

LINES = 2000


def submit(folder: Path, base_url: str) -> str:
    """The id of a new batch of example requests."""
    requests = folder / "requests.jsonl"
    lines = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    with requests.open("w") as file:
        for number, line in enumerate(islice(cycle(lines), LINES)):
            file.write(json.dumps({**line, "custom_id": f"request-{number}"}) + "\n")
    done = run_pipeline("batches", "submit", requests, OPENAI_BASE_URL=f"{base_url}/v1")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.proof
def test_a_batch_is_followed_to_its_end_whatever_is_killed(tmp_path: Path) -> None:
    with running_fleet(workers=2, api=True) as fleet:
        url, api_url = fleet.redis.url, fleet.api_url
        assert api_url is not None
        environment = command_environment(url, {"TERM": "xterm-256color"})
        with on_terminal(command("top"), environment, columns=140) as terminal:

            def wait_for(*texts: str) -> str:
                fleet.wait(lambda: all(any(text in line for line in terminal.frame) for text in texts), 250, str(texts))
                return next(line for line in terminal.frame if texts[0] in line)

            workers = {worker.pid: worker.id for worker in fleet.queue.workers()}
            wait_for("2 workers", *workers.values())
            batch = submit(tmp_path, api_url)
            assert {"in_progress", str(LINES)} <= set(wait_for(batch, "in_progress", f" {LINES} ").split())
            killed = workers[fleet.workers[0].pid]
            fleet.workers[0].send(signal.SIGKILL)
            fleet.wait(lambda: not any(killed in line for line in terminal.frame), 250, "the worker to be struck off")
            wait_for("2 workers")
            fleet.redis.kill()
            wait_for("no answer from Redis")
            fleet.redis.start()
            wait_for("Redis answers")
            row = wait_for(batch, "completed", " ago")
            assert row.split()[3:6] == [str(LINES), "0", str(LINES)]
            fleet.wait(  # a worker that was just started reports its cache some seconds later
                lambda: all("%" in line for line in terminal.frame if "ready" in line), 250, "each worker's cache"
            )
            terminal.press(b"q")
            assert terminal.end() == 0
        once = run_pipeline("top", "--once", redis_url=url)
        assert [line.split()[1] for line in once.stdout.splitlines() if line.startswith(batch)] == ["completed"]
