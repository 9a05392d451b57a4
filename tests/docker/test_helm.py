"""The Helm chart: what was rendered is of this chart, valid by the published schemas, and fits the
processes. With a helm on PATH it is rendered again.
"""

import copy
import json
import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from api import main as api_main
from api.http_settings import PROBED
from api.settings import ApiSettings
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.settings import variable
from pipeline import child, supervisor
from pipeline.main import CommandGroup
from tests.docker import monitoring
from tests.docker.recipe import environment, folders, lineage, stages
from tests.docker.test_monitoring import ask, needs_prometheus, running_prometheus
from tests.support.api_server import official_client, running_api
from tests.support.commands import REPOSITORY
from tests.support.redis_server import running_server
from tests.support.waiting import wait_until
from tests.support.worker_process import running_worker
from tests.workers.test_worker import SETTINGS
from tools.helm_chart import CHART, EXAMPLES, first_line, render, rendered_file
from workers.replica.requeue import GOODBYE_SECONDS

Object = dict[str, Any]

SCHEMAS = {"ScaledObject": "scaledobject.json", "ServiceMonitor": "servicemonitor.json"}
OF_TARGET = {"namespace", "job"}  # labels that Prometheus adds to those of `/metrics`
SECRET_VALUES = {"REDIS_URL": "redis://queue", "PIPELINE_WEBHOOK_SECRET": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"}
NOT_FLAGS = {"HF_TOKEN", "OMP_NUM_THREADS"}
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm on this machine")


def objects(text: str) -> dict[tuple[str, str], Object]:
    """What a rendered file has, by kind and name."""
    found = [one for one in yaml.safe_load_all(text) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


RENDERED = {path.stem: objects(rendered_file(path).read_text()) for path in EXAMPLES}
ALL = [(example, kind, name) for example, found in RENDERED.items() for kind, name in found]


def of_kind(*kinds: str) -> "pytest.MarkDecorator":
    """Run a test for each object of these kinds that was rendered."""
    chosen = [(example, one) for example, found in RENDERED.items() for one in found.values() if one["kind"] in kinds]
    ids = [f"{example}-{one['kind']}-{one['metadata']['name']}" for example, one in chosen]
    return pytest.mark.parametrize(("example", "found"), chosen, ids=ids)


def pod_of(deployment: Object) -> tuple[Object, Object]:
    """The pod's specification and that of its container."""
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    return pod, container


def variables(container: Object) -> dict[str, str]:
    """The environment, with values in place of those of Secrets."""
    return {
        one["name"]: one["value"] if "value" in one else SECRET_VALUES.get(one["name"], "x") for one in container["env"]
    }


def queries(scaled: Object) -> list[str]:
    """What the triggers of an object ask Prometheus."""
    return [one["metadata"]["query"] for one in scaled["spec"]["triggers"] if one["type"] == "prometheus"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_rendered_is_of_this_chart(example: Path) -> None:
    assert rendered_file(example).read_text().startswith(first_line(example)), "run `make helm`, which needs helm"


def test_every_example_is_rendered_and_nothing_else() -> None:
    assert {path.name for path in (CHART / "rendered").iterdir()} == {path.name for path in EXAMPLES}


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_helm_renders_what_is_kept(example: Path) -> None:
    done = render(example)
    assert done.returncode == 0, done.stderr
    assert objects(done.stdout) == RENDERED[example.stem]


@of_kind("Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy")
@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
def test_an_object_is_valid_by_the_schema_of_kubernetes(example: str, found: Object, version: str) -> None:
    kubernetes_validate.validate(found, version, strict=True)


@of_kind(*SCHEMAS)
def test_an_object_is_valid_by_the_schema_of_its_operator(example: str, found: Object) -> None:
    schema = json.loads((Path(__file__).parent / "schemas" / SCHEMAS[found["kind"]]).read_text())
    jsonschema.validate(found, _closed(schema))


def _closed(schema: Any) -> Any:
    """The schema, so that it refuses what it does not know."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **closed} if "properties" in schema and "type" in schema else closed


def test_no_kind_is_left_unchecked() -> None:
    ours = {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget", "NetworkPolicy"}
    assert {kind for _, kind, _ in ALL} == ours | set(SCHEMAS)


@of_kind("Deployment")
def test_a_pod_runs_a_command_with_flags_and_variables_that_it_knows(
    example: str, found: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, container = pod_of(found)
    for name, value in variables(container).items():
        monkeypatch.setenv(name, value)
    command, *arguments = container["args"]
    known = CommandGroup().get_command(None, command)  # type: ignore[arg-type]
    assert known is not None
    with known.make_context(command, arguments) as context:
        options = {param.envvar for param in context.command.params if isinstance(param, click.Option)}
    without_flags = {variable(one) for one in fields(QueueSettings)}
    assert set(variables(container)) - NOT_FLAGS <= options | without_flags


@of_kind("Deployment")
def test_a_pod_has_no_right_that_it_does_not_need(example: str, found: Object) -> None:
    pod, container = pod_of(found)
    users = {int(value.split(":")[0]) for name in stages() for value in lineage(name)[-1].values("USER")}
    security = pod["securityContext"]
    assert {security["runAsUser"], security["runAsGroup"], security["fsGroup"]} == users
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    own = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == own


@of_kind("Deployment")
def test_a_pod_writes_to_volumes_where_its_image_looks_for_them(example: str, found: Object) -> None:
    pod, container = pod_of(found)
    target = container["image"].partition(":")[0].rpartition("inference-")[2]
    assert target in stages()
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} - {"/dev/shm"}
    expected = {environment(target)["FILE_STORE"]} if target == "control" else {"/cache", "/locks"}
    assert written == expected | {"/tmp"}
    assert expected <= set(folders(target))
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claims = {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    assert claims - {"models"} <= {name for kind, name in RENDERED[example] if kind == "PersistentVolumeClaim"}


@of_kind("Deployment")
def test_a_pod_has_the_time_to_stop_in_order(example: str, found: Object) -> None:
    pod, container = pod_of(found)
    flags = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"][1:])
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in container else 0
    needed = {
        "api": api_main._STOP_SECONDS,
        # RQ workers, then the ticker
        "jobs": 2 * supervisor._STOP_SECONDS + 3 * child._LAST_OUTPUT_SECONDS,
        "worker": float(flags.get("shutdown-timeout", 0)) + 6 * GOODBYE_SECONDS,
    }
    assert pod["terminationGracePeriodSeconds"] > waits + needed[container["args"][0]]


@of_kind("Deployment")
def test_a_pod_is_probed_by_what_its_process_answers(example: str, found: Object) -> None:
    _, container = pod_of(found)
    command, probe = container["args"][0], container["readinessProbe"]
    if command == "api":
        assert probe["httpGet"]["path"] in PROBED
        [port] = container["ports"]
        assert f"--port={port['containerPort']}" in container["args"]
        assert {probe["httpGet"]["port"], container["livenessProbe"]["tcpSocket"]["port"]} == {port["name"]}
    else:
        _, name, *arguments = probe["exec"]["command"]
        health = CommandGroup().get_command(None, name)  # type: ignore[arg-type]
        assert health is not None
        health.make_context(name, list(arguments))
        assert arguments == [command]
        assert "livenessProbe" not in container


@pytest.mark.parametrize("example", RENDERED)
def test_what_selects_pods_finds_those_of_one_deployment(example: str) -> None:
    found = RENDERED[example]
    pods = {
        name: one["spec"]["template"]["metadata"]["labels"]
        for (kind, name), one in found.items()
        if kind == "Deployment"
    }
    for (kind, name), one in found.items():
        selector = one["spec"].get("podSelector", one["spec"].get("selector", {}))
        labels = selector.get("matchLabels", selector) if isinstance(selector, dict) else {}
        if kind in ("PersistentVolumeClaim", "ScaledObject"):
            continue
        chosen = {pod for pod, of_pod in pods.items() if labels.items() <= of_pod.items()}
        assert chosen == (set(pods) if name == "inference-all" else {name}), (kind, name)
    assert {name for kind, name in found if kind == "PodDisruptionBudget"} == set(pods)
    scaled = {one["spec"]["scaleTargetRef"]["name"] for (kind, _), one in found.items() if kind == "ScaledObject"}
    assert scaled == {name for name in pods if "replicas" not in found["Deployment", name]["spec"]}


@pytest.mark.parametrize("example", RENDERED)
def test_the_port_of_the_api_is_one_for_service_policy_and_monitor(example: str) -> None:
    found = RENDERED[example]
    [port] = pod_of(found["Deployment", "inference-api"])[1]["ports"]
    [service] = found["Service", "inference-api"]["spec"]["ports"]
    [rule] = found["NetworkPolicy", "inference-api"]["spec"]["ingress"]
    assert service["targetPort"] == rule["ports"][0]["port"] == port["name"]
    assert "ingress" not in found["NetworkPolicy", "inference-all"]["spec"]
    if monitor := found.get(("ServiceMonitor", "inference-api")):
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] == service["name"]
        assert endpoint["relabelings"][0]["replacement"] == f"inference-api.default.svc:{service['port']}"


@of_kind("ScaledObject")
def test_a_trigger_asks_for_what_is_exported(example: str, found: Object) -> None:
    exported = monitoring.exported()
    for query in queries(found):
        selectors = monitoring.selectors(query)
        assert selectors
        for name, labels in selectors:
            assert OF_TARGET <= labels <= exported[name] | OF_TARGET, query
    assert all(float(one["metadata"].get("threshold", 1)) > 0 for one in found["spec"]["triggers"])


def test_the_api_lets_calls_wait_for_a_model_that_sleeps_and_for_no_other() -> None:
    arguments = pod_of(RENDERED["gpus"]["Deployment", "inference-api"])[1]["args"]
    scaled = [one for (kind, _), one in RENDERED["gpus"].items() if kind == "ScaledObject"]
    asleep = {one["spec"]["scaleTargetRef"]["name"] for one in scaled if one["spec"]["minReplicaCount"] == 0}
    for (kind, name), one in RENDERED["gpus"].items():
        if kind == "Deployment" and "-worker-" in name:
            flags = pod_of(one)[1]["args"]
            served = [flag.partition("=")[2] for flag in flags if flag.startswith("--served-model-name=")]
            assert served
            flag = "--on-demand-model" if name in asleep else "--expected-model"
            assert [f"{flag}={model}" for model in served] == [
                one for one in arguments if one.partition("=")[2] in served
            ]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


# What is changed in the values of examples/minimal.yaml, by path, and what the refusal says
REFUSED_BY_SCHEMA = {
    "redis.url=localhost:6379": "does not match",
    "servingEngineSpec.modelSpec.0.name=Qwen": "does not match",
    "servingEngineSpec.modelSpec.0.requestGPU=-1": "minimum",
    "servingEngineSpec.modelSpec.0.gpus=1": "gpus",
    "servingEngineSpec.modelSpec.0.requestMemory=much": "does not match",
    'servingEngineSpec.modelSpec=[{"name": "qwen"}]': "modelURL",
    'servingEngineSpec.modelSpec=[{"modelURL": "Qwen/Qwen3-0.6B"}]': "name",
    "apiSpec.keda.minReplicaCount=0": "minimum",
    "apiSpec.replicas=3": "replicas",
    'fileStore.accessModes=["ReadWriteSome"]': "ReadWriteSome",
    "webhook.url=example.com": "does not match",
    "jobs=1": "jobs",
}
REFUSED_BY_TEMPLATES = {
    'redis.url=""': "there is no Redis server: set redis.url, or redis.existingSecret",
    "webhook.url=https://example.com": "webhook.existingSecret is missing",
    "servingEngineSpec.modelSpec.0.keda.enabled=true": "keda.serverAddress is missing",
    "servingEngineSpec.modelSpec.0.name=a-name-that-is-too-long-for-a-pod": "choose a shorter name",
    'servingEngineSpec.modelSpec=[{"name": "a", "modelURL": "b"}, {"name": "a", "modelURL": "c"}]': "two entries",
    'apiSpec.keda={"enabled": true, "minReplicaCount": 20}': "minReplicaCount is above maxReplicaCount",
}


def values_with(change: str) -> Object:
    """The values of the smallest example with one of them changed."""
    values: Object = yaml.safe_load((CHART / "examples" / "minimal.yaml").read_text())
    path, _, text = change.partition("=")
    *parents, last = path.split(".")
    at: Any = values
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    at[last] = yaml.safe_load(text)
    return values


def merged(values: Object) -> Object:
    """The values over those of the chart, as helm merges them."""
    found = yaml.safe_load((CHART / "values.yaml").read_text())

    def put(into: Object, given: Object) -> None:
        for key, value in given.items():
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                put(into[key], value)
            else:
                into[key] = copy.deepcopy(value)

    put(found, values)
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_takes_the_values_of_an_example(example: Path) -> None:
    _check_values(yaml.safe_load(example.read_text()))


@pytest.mark.parametrize("change", REFUSED_BY_SCHEMA)
def test_the_schema_refuses_wrong_values(change: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=REFUSED_BY_SCHEMA[change]):
        _check_values(values_with(change))


@needs_helm
@pytest.mark.parametrize("change", [*REFUSED_BY_SCHEMA, *REFUSED_BY_TEMPLATES])
def test_helm_refuses_wrong_values_in_a_sentence(change: str, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(values_with(change)))
    done = render(values)
    assert done.returncode != 0
    assert REFUSED_BY_TEMPLATES.get(change, "values don't meet the specifications of the schema") in done.stderr


def _check_values(values: Object) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(merged(values), schema)


@needs_prometheus
@pytest.mark.proof
@pytest.mark.timeout(300)
def test_what_keda_asks_for_rises_while_a_call_waits_for_a_model_that_sleeps(tmp_path: Path) -> None:
    """A Prometheus with the relabelings of the ServiceMonitor takes the API's pods for one."""
    found = RENDERED["gpus"]
    asked = [query.replace("bge-m3", "demo") for query in queries(found["ScaledObject", "inference-worker-embed"])]
    with running_server(tmp_path) as server:
        settings = ApiSettings(redis_url=server.url, file_store=str(tmp_path / "store"), on_demand_models=("demo",))
        with running_api(settings) as api, running_prometheus(tmp_path, api, _scraping_as_the_operator()) as url:

            def figures() -> list[list[float]]:
                return [[float(one["value"][1]) for one in ask(url, query)] for query in asked]

            wait_until(lambda: figures() == [[0], [0], [0]], 60, "each query to find one figure")
            assert len(httpx.get(f"{url}/api/v1/targets").json()["data"]["activeTargets"]) == 1
            with official_client(api) as client, ThreadPoolExecutor(1) as pool:
                answer = pool.submit(client.completions.create, model="demo", prompt="What is 2 + 3?", max_tokens=8)
                wait_until(lambda: figures()[0] == [1] and figures()[1][0] > 0, 60, "the call to be seen")
                with running_worker(Queue(connect(server.url), SETTINGS), server.url):
                    assert answer.result(120).choices
                    wait_until(lambda: figures() == [[0], [0], [0]], 60, "nothing to wait or run")


def _scraping_as_the_operator() -> str:
    """The configuration that Prometheus Operator makes of the ServiceMonitor, for two pods."""
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
        "job_name": "inference-api",
        "metrics_path": endpoint["path"],
        "static_configs": pods,
        "relabel_configs": relabelings,
    }
    return yaml.safe_dump({"global": {"scrape_interval": endpoint["interval"]}, "scrape_configs": [job]})
