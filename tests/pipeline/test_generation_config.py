"""Defaults of a model's generation_config.json: a run that is killed, and live calls."""

import json
import re
import shutil
from pathlib import Path

import httpx

from tests.pipeline.results import read_results
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.waiting import wait_until
from workers.settings import DEMO_MODEL

CHAT = {"messages": [{"role": "user", "content": "Count"}], "ignore_eos": True}


def model_folder(folder: Path, **values: object) -> Path:
    model = Path(shutil.copytree(DEMO_MODEL, folder))
    file = model / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return model


def test_a_run_keeps_them_when_it_is_resumed_with_others(tmp_path: Path) -> None:
    model, source, output = (
        model_folder(tmp_path / "m", max_new_tokens=3),
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
    )
    line = {"method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    source.write_text("".join(json.dumps({"custom_id": f"c{number}", **line}) + "\n" for number in range(300)))
    arguments = ("run-batch", source, "-o", output, "--model", model, "--no-deduplicate")
    with running_pipeline(*arguments, "--max-num-seqs", 2) as command:
        wait_until(lambda: list(tmp_path.glob("out.jsonl.parts/parts/*")), 100, "lines on disk")
        command.process.kill()
        assert "calls get the model's defaults for what they leave unset: max_tokens 3" in command.output
    done = run_pipeline(*arguments, "--override-generation-config", '{"max_new_tokens": 5}')
    assert done.returncode == 0, done.stderr
    assert "max_tokens 5" in done.stderr
    assert {row["response"]["body"]["usage"]["completion_tokens"] for row in read_results(output)} == {3}


def test_live_calls_get_them_unless_they_set_their_own(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "m", max_new_tokens=3, temperature=0.0)
    flags = ("--model", model, "--override-generation-config", '{"max_new_tokens": 4}', "--port", 0)
    with running_pipeline("serve", *flags, "--file-store", tmp_path / "store") as command:
        command.wait_for("worker INFO ready")
        url = re.search(r"listening on (http://\S+)", command.output)
        assert url is not None

        def tokens(**own: object) -> int:
            answer = httpx.post(f"{url[1]}/v1/chat/completions", json={"model": "m", **CHAT, **own}, timeout=100)
            return int(answer.json()["usage"]["completion_tokens"])

        assert (tokens(), tokens(max_tokens=None), tokens(max_tokens=6)) == (4, 4, 6)
