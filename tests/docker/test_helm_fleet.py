"""Processes as the pods of the Helm chart run them, and what KEDA asks for meanwhile."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from api.settings import ApiSettings
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.docker.chart import RENDERED, pod_of, queries, variables
from tests.docker.test_monitoring import ask, needs_prometheus, running_prometheus
from tests.support import http_calls
from tests.support.api_server import official_client, running_api
from tests.support.commands import RunningCommand, run_pipeline, running_pipeline
from tests.support.ports import reserved_port
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until
from tests.support.worker_process import running_worker
from tests.workers.test_worker import SETTINGS
from workers.settings import DEMO_MODEL

MODEL = "Qwen/Qwen3-0.6B"  # of examples/minimal.yaml, by this name

pytestmark = pytest.mark.proof


class Pods:
    """Runs the containers of examples/minimal.yaml as processes of this machine, with the demo
    model, a Redis and a file store of the test.
    """

    def __init__(self, folder: Path, redis_url: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._changed = {f"--model={MODEL}": f"--model={DEMO_MODEL}", "--port=8000": f"--port={port}"}
        self.variables = {"REDIS_URL": redis_url, "FILE_STORE": str(folder / "files")}

    @contextmanager
    def running(self, name: str) -> Iterator[RunningCommand]:
        """A pod, which at the end gets SIGTERM and has to end in the time that it has."""
        pod, container = pod_of(RENDERED["minimal"]["Deployment", name])
        arguments = [self._changed.get(argument, argument) for argument in container["args"]]
        given = {**variables(container), **self.variables}
        with running_pipeline(*arguments, **given) as process:
            yield process
            process.process.send_signal(signal.SIGTERM)
            assert process.wait(pod["terminationGracePeriodSeconds"]) == 0, process.output

    def wait_ready(self, name: str, process: RunningCommand) -> None:
        """Ask as its readiness probe does."""
        probe = pod_of(RENDERED["minimal"]["Deployment", name])[1]["readinessProbe"]

        def is_ready() -> bool:
            assert process.process.poll() is None, process.output
            if "exec" in probe:
                _, *arguments = probe["exec"]["command"]
                return run_pipeline(*arguments, **self.variables).returncode == 0
            try:
                return http_calls.get(f"{self.url}{probe['httpGet']['path']}").is_success
            except httpx.TransportError:
                return False

        wait_until(is_ready, 150, f"{name} to be ready")


@pytest.mark.timeout(600)
def test_pods_do_a_batch_that_came_while_the_worker_was_scaled_to_zero(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, reserved_port() as port:
        pods = Pods(tmp_path, server.url, port)
        refused = run_pipeline("api", "--host=0.0.0.0", f"--port={port}", **pods.variables)
        assert (refused.returncode, "there is no API key" in refused.stderr) == (2, True), refused.stderr
        key = json.loads(run_pipeline("keys", "create", "--json", **pods.variables).stdout)["secret"]
        with pods.running("inference-api") as api, pods.running("inference-jobs") as jobs:
            pods.wait_ready("inference-api", api)
            pods.wait_ready("inference-jobs", jobs)
            with pods.running("inference-worker-qwen") as worker:  # so that the model is known
                pods.wait_ready("inference-worker-qwen", worker)
            with official_client(pods.url, api_key=key) as client:
                body = {"model": MODEL, "prompt": "What is 2 + 3?", "max_tokens": 8}
                line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
                file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                waiting = f'pipeline_requests_waiting{{kind="batch",model_name="{MODEL}"}} 1.0'
                wait_until(lambda: waiting in http_calls.get(f"{pods.url}/metrics").text, 120, "the line to wait")
                with pods.running("inference-worker-qwen"):
                    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 240, "the batch")
                assert client.batches.retrieve(batch.id).request_counts.completed == 1


@needs_prometheus
@pytest.mark.timeout(300)
def test_what_keda_asks_for_rises_while_a_call_waits_for_a_model_that_sleeps(tmp_path: Path) -> None:
    """A Prometheus with the relabelings of the ServiceMonitor takes the API's pods for one."""
    found = RENDERED["gpus"]
    asked = [query.replace("bge-m3", "demo") for query in queries(found["ScaledObject", "inference-worker-embed"])]
    with running_server(tmp_path) as server:
        settings = ApiSettings(redis_url=server.url, file_store=str(tmp_path / "store"), on_demand_models=("demo",))
        with running_api(settings) as api, running_prometheus(tmp_path, api, *_scraping_as_the_operator()) as url:

            def figures() -> list[list[float]]:
                return [[float(one["value"][1]) for one in ask(url, query)] for query in asked]

            wait_until(lambda: figures() == [[0]], 60, "the query to find one figure")
            assert len(http_calls.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]) == 1
            with official_client(api) as client, ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.completions.create, model="demo", prompt="What is 2 + 3?", max_tokens=8)
                wait_until(lambda: figures() == [[1]], 60, "the call to be seen")
                with running_worker(Queue(connect(server.url), SETTINGS), server.url):
                    assert answer.result(120).choices
                    wait_until(lambda: figures() == [[0]], 60, "nothing to wait or run")


def _scraping_as_the_operator() -> tuple[str, str]:
    """The configuration that Prometheus Operator makes of the ServiceMonitor, for two pods, and the
    name of its job.
    """
    monitor = RENDERED["gpus"]["ServiceMonitor", "inference-api"]
    [endpoint] = monitor["spec"]["endpoints"]
    names = {"targetLabel": "target_label", "replacement": "replacement", "action": "action", "regex": "regex"}
    relabelings = [{names[key]: value for key, value in one.items()} for one in endpoint["relabelings"]]
    relabelings[0]["replacement"] = "api:8000"
    pods = [
        {"targets": [f"10.0.0.{number}:8000"], "labels": {"namespace": "default", "pod": f"api-{number}"}}
        for number in (1, 2)
    ]
    job = {
        "job_name": monitor["metadata"]["name"],
        "metrics_path": endpoint["path"],
        "static_configs": pods,
        "relabel_configs": relabelings,
    }
    return yaml.safe_dump({"global": {"scrape_interval": endpoint["interval"]}, "scrape_configs": [job]}), job[
        "job_name"
    ]
