"""What a server says of itself, and what it keeps to itself."""

import json
import time
from importlib.metadata import version
from pathlib import Path

import httpx
from redis import Redis

from api.settings import ApiSettings
from jobs.queue.registry import EngineRecord, WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key
from tests.support.api_server import plain_client, running_api

ENGINE = EngineRecord("cuda:0", "bfloat16", "triton", 1024, "fp_1")


def test_it_says_what_is_served_by_which_workers(http: httpx.Client, queue: Queue) -> None:
    queue.register_worker(
        WorkerRecord(
            *("w-secret-host", ["m"], "ready", 4096, time.time(), "secret-host", 1),
            tasks=("generate", "tokenize"),
            engine=ENGINE,
        )
    )
    queue.register_worker(WorkerRecord("old", ["m"], "loading", 0, time.time(), "secret-host", 2))
    info = http.get("/server_info").json()
    assert info["version"] == http.get("/version").json()["version"] == version("batch-inference-pipeline")
    endpoints = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
    assert info["models"] == [{"id": "m", "max_model_len": 4096, "endpoints": endpoints}]
    assert info["workers"][0] == {
        "state": "ready",
        "models": ["m"],
        "max_model_len": 4096,
        "device": "cuda:0",
        "dtype": "bfloat16",
        "backend": "triton",
        "max_num_seqs": 1024,
        "system_fingerprint": "fp_1",
    }
    assert (info["workers"][1]["state"], info["workers"][1]["device"]) == ("loading", None)
    assert info["settings"]["max_batch_lines"] == 50_000
    assert info["settings"]["completion_windows"] == ["24h"]
    assert "secret-host" not in json.dumps(info)


def test_no_address_path_or_key_is_shown(redis_url: str, redis_client: Redis, tmp_path: Path) -> None:
    _, secret = create_key(str(tmp_path), tenant="a-tenant")
    settings = ApiSettings(
        redis_url=redis_url, file_store=str(tmp_path), allowed_hosts=("a-host",), expected_models=("a-model",)
    )
    with running_api(settings) as url, plain_client(url) as http:
        assert http.get("/version").status_code == 200
        assert http.get("/server_info").status_code == 401
        shown = http.get("/server_info", headers={"authorization": f"Bearer {secret}"}).text
    for hidden in (redis_url, str(tmp_path), secret, "a-host", "a-tenant", "127.0.0.1"):
        assert hidden not in shown
