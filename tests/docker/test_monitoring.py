"""The files for Prometheus and Grafana: they ask for what is exported, and a real Prometheus finds
it.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.settings import ApiSettings
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.docker import monitoring
from tests.docker.composition import FOLDER
from tests.support import http_calls
from tests.support.api_server import official_client, running_api
from tests.support.commands import REPOSITORY
from tests.support.ports import reserved_port
from tests.support.redis_server import running_server
from tests.support.waiting import wait_for_value, wait_until
from tests.support.worker_process import running_worker
from tests.workers.test_worker import SETTINGS

EXPORTED = monitoring.exported()
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no Prometheus on this machine; Debian's package is `prometheus`",
)
# What a fleet on CPUs that has answered one live call has no figures for
EMPTY_PANELS = {"Busy", "Memory in use", "Power", "Errors", "Batches in work"}


@pytest.mark.parametrize(("title", "query"), [*monitoring.panel_queries()])
def test_a_panel_asks_for_what_is_exported(title: str, query: str) -> None:
    _check_selectors(query)


@pytest.mark.parametrize("rule", monitoring.alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(rule: dict[str, Any]) -> None:
    if "up{" not in rule["expr"]:
        _check_selectors(rule["expr"])
    assert set(rule["annotations"]) == {"summary", "description", "action", "runbook_url"}
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    assert f"\n### {rule['alert']}\n" in (REPOSITORY / page).read_text()
    assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_metric_of_the_workers_and_the_queue_can_be_seen_on_the_board() -> None:
    shown = {name for _, query in monitoring.panel_queries() for name, _ in monitoring.selectors(query)}
    families = {re.sub("_(bucket|sum|count|total)$", "", name) for name in shown}
    known = {re.sub("_(bucket|sum|count|total)$", "", name) for name in EXPORTED}
    left_out = {
        "pipeline_engine_free_blocks",  # `vllm:kv_cache_usage_perc` says it
        "pipeline_engine_blocks",
        "pipeline_engine_tokens_per_second",
        "vllm:prompt_tokens",
        "vllm:prompt_tokens_cached",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    }
    assert known - families == left_out


def test_no_two_panels_have_one_id_or_one_place() -> None:
    panels = monitoring.board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_grafana_is_given_the_source_and_the_board() -> None:
    compose = yaml.safe_load(monitoring.COMPOSE.read_text())
    grafana, prometheus = compose["services"]["grafana"], compose["services"]["prometheus"]
    mounts = dict(volume.split(":")[:2] for volume in (*grafana["volumes"], *prometheus["volumes"]))
    [source] = yaml.safe_load((monitoring.PROVISIONING / "datasources" / "prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((monitoring.PROVISIONING / "dashboards" / "files.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    folder = mounts["./grafana/dashboards"]
    assert provider["options"]["path"] == folder
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{folder}/{monitoring.BOARD.name}"
    assert f"--config.file={mounts['./prometheus']}/{monitoring.CONFIG.name}" in prometheus["command"]
    assert f"--storage.tsdb.path={mounts['metrics']}" in prometheus["command"]
    [target] = yaml.safe_load(monitoring.CONFIG.read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == "api:8000"


def test_the_services_are_for_this_host_alone() -> None:
    for service in yaml.safe_load(monitoring.COMPOSE.read_text())["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service["user"].startswith("0")
        assert all(not source.startswith("./") or rest.endswith(":ro") for source, _, rest in _volumes(service))


def test_the_folders_have_no_file_that_nothing_uses() -> None:
    used = {monitoring.CONFIG, monitoring.ALERTS, monitoring.BOARD}
    used |= set(monitoring.PROVISIONING.glob("*/*.yaml"))
    assert {path for name in ("prometheus", "grafana") for path in (FOLDER / name).rglob("*") if path.is_file()} == used


@needs_prometheus
def test_each_alert_fires_where_it_should_and_nowhere_else(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())
    annotations = {rule["alert"]: rule["annotations"] for rule in monitoring.alerts()}
    checks = [check for case in cases["tests"] for check in case["alert_rule_test"] if "exp_alerts" in check]
    for check in checks:
        for expected in check["exp_alerts"]:
            expected["exp_annotations"] = annotations[check["alertname"]] | expected["exp_annotations"]
    assert {check["alertname"] for check in checks} == set(annotations)
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases | {"rule_files": [str(monitoring.ALERTS)]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "cases.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_prometheus_finds_what_the_board_and_the_alerts_ask_for(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        queue = Queue(connect(server.url), SETTINGS)
        settings = ApiSettings(redis_url=server.url, file_store=str(tmp_path / "store"))
        with running_api(settings) as api, running_worker(queue, server.url), running_prometheus(tmp_path, api) as url:
            wait_for_value(lambda: _panels_without_figures(api, url), EMPTY_PANELS, 120, "the other panels' figures")
            groups = http_calls.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in monitoring.alerts()}
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


def _panels_without_figures(api: str, prometheus: str) -> set[str]:
    """The titles of panels that have no figures after one more call: a rate is of what changed
    between two scrapes.
    """
    with official_client(api) as client:
        client.completions.create(model="demo", prompt="What is 2 + 3?", max_tokens=8, extra_body={"ignore_eos": True})
    found = {title for title, query in monitoring.panel_queries() if ask(prometheus, query)}
    return {panel["title"] for panel in monitoring.panels()} - found


@contextmanager
def running_prometheus(
    folder: Path, api: str, text: str = monitoring.CONFIG.read_text(), job: str = "pipeline"
) -> Iterator[str]:
    """The address of a Prometheus with the configuration in `docker/`, or with another, but for the
    address of the API and for the time between scrapes.
    """
    text = text.replace("api:8000", api.removeprefix("http://"))
    text = re.sub("_interval: .*", "_interval: 1s", text).replace("alerts.yml", str(monitoring.ALERTS))
    (folder / "prometheus.yml").write_text(text)
    with reserved_port() as port, (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _is_up(url, job), 60, "Prometheus to scrape the API")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def ask(url: str, query: str) -> list[Any]:
    """The series that a query finds, those whose value is not a number left out."""
    answer = http_calls.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", (query, answer)
    return [series for series in answer["data"]["result"] if series["value"][1] != "NaN"]


def _is_up(url: str, job: str) -> bool:
    try:
        return http_calls.get(f"{url}/-/ready").is_success and bool(ask(url, f'up{{job="{job}"}} == 1'))
    except httpx.TransportError:
        return False


def _check_selectors(query: str) -> None:
    found = monitoring.selectors(query)
    assert found
    for name, labels in found:
        assert name in EXPORTED
        assert labels <= EXPORTED[name], name


def _volumes(service: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [volume.partition(":") for volume in service["volumes"]]
