"""The Helm chart: what was rendered is of this chart, valid by the published schemas, and fits the
processes. With a helm on PATH it is rendered again.
"""

import json
import subprocess
import tomllib
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from api.http_settings import ALIVE, PROBED
from jobs.queue.settings import QueueSettings
from jobs.settings import variable
from pipeline import child, supervisor
from pipeline.main import CommandGroup
from tests.docker import monitoring
from tests.docker.chart import ALL, RENDERED, Object, needs_helm, objects, of_kind, pod_of, queries, variables
from tests.docker.recipe import environment, folders, lineage, stages
from tests.docker.test_monitoring import needs_prometheus
from tests.support.commands import REPOSITORY
from tests.support.object_stores import bucket
from tools.helm_chart import CHART, EXAMPLES, first_line, render, rendered_file
from workers.engine.messages.config import CPU_SEQUENCES, GPU_SEQUENCES
from workers.replica.requeue import GOODBYE_SECONDS

SCHEMAS = {"ScaledObject": "scaledobject.json", "ServiceMonitor": "servicemonitor.json"}
OF_TARGET = {"namespace", "job"}  # labels that Prometheus adds to those of `/metrics`
NOT_FLAGS = {"HF_TOKEN", "OMP_NUM_THREADS", "AWS_ENDPOINT_URL", "AWS_REGION"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_what_is_rendered_is_of_this_chart(example: Path) -> None:
    first, text = rendered_file(example).read_text().split("\n", 1)
    assert f"{first}\n" == first_line(example, text), "run `make helm`, which needs helm"


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
    assert len(variables(container)) == len(container["env"])
    for name, value in variables(container).items():
        monkeypatch.setenv(name, value)
    command, *arguments = container["args"]
    known = CommandGroup().get_command(None, command)  # type: ignore[arg-type]
    assert known is not None
    with ExitStack() as stack:
        if "FILE_STORE" in variables(container):  # they try it
            monkeypatch.setenv("FILE_STORE", stack.enter_context(bucket()).uri)
        context = stack.enter_context(known.make_context(command, arguments))
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
    files = set[str]() if "FILE_STORE" in variables(container) else {environment("control")["FILE_STORE"]}
    expected = files if target == "control" else {"/cache", "/locks"}
    assert written == expected | {"/tmp"}
    assert expected <= set(folders(target))
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    theirs = {"models", "shared-files"}
    claims = {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    assert claims - theirs <= {name for kind, name in RENDERED[example] if kind == "PersistentVolumeClaim"}


@of_kind("Deployment")
def test_a_pod_has_the_time_to_stop_in_order(example: str, found: Object) -> None:
    pod, container = pod_of(found)
    flags = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"][1:])
    waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in container else 0
    needed = {
        "api": float(flags.get("timeout-graceful-shutdown", 0)),
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
        alive = container["livenessProbe"]
        assert alive["httpGet"]["path"] == ALIVE
        assert {probe["httpGet"]["port"], alive["httpGet"]["port"]} == {port["name"]}
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
        assert chosen == (set(pods) if name.endswith("-all") else {name}), (kind, name)
    assert {name for kind, name in found if kind == "PodDisruptionBudget"} == set(pods)
    scaled = {one["spec"]["scaleTargetRef"]["name"] for (kind, _), one in found.items() if kind == "ScaledObject"}
    assert scaled == {name for name in pods if "replicas" not in found["Deployment", name]["spec"]}


@pytest.mark.parametrize("example", RENDERED)
def test_the_port_of_the_api_is_one_for_service_policy_and_monitor(example: str) -> None:
    found = RENDERED[example]
    [api] = [name for kind, name in found if kind == "Service"]
    [port] = pod_of(found["Deployment", api])[1]["ports"]
    [service] = found["Service", api]["spec"]["ports"]
    [rule] = found["NetworkPolicy", api]["spec"]["ingress"]
    assert service["targetPort"] == rule["ports"][0]["port"] == port["name"]
    assert "ingress" not in found["NetworkPolicy", f"{api.removesuffix('api')}all"]["spec"]
    if monitor := found.get(("ServiceMonitor", api)):
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


@of_kind("ScaledObject")
def test_requests_that_one_worker_runs_at_once_start_no_other(example: str, found: Object) -> None:
    trigger = found["spec"]["triggers"][0]["metadata"]
    name = found["spec"]["scaleTargetRef"]["name"]
    _, container = pod_of(RENDERED[example]["Deployment", name])
    if container["args"][0] == "worker" and name != "llm-worker-tiny":
        most = GPU_SEQUENCES if "--device=cuda" in container["args"] else CPU_SEQUENCES
        assert float(trigger["threshold"]) == most
    assert "age" not in trigger["query"]
    assert "metricType" not in trigger  # AverageValue


def test_the_age_of_calls_asks_for_workers_only_where_it_is_set() -> None:
    asked = {
        found["metadata"]["name"]: [(one["metadata"]["query"], one["metadata"]["threshold"]) for one in more]
        for example, kind, name in ALL
        for found in [RENDERED[example][kind, name]]
        if kind == "ScaledObject" and (more := found["spec"]["triggers"][1:]) and more[0]["type"] == "prometheus"
    }
    [(name, [(query, seconds)])] = asked.items()
    assert (name, seconds) == ("inference-worker-qwen", "60")
    age, *of_workers = monitoring.selectors(query)
    assert age == ("pipeline_oldest_request_age_seconds", {"namespace", "job", "kind", "model_name"})
    assert {name for name, _ in of_workers} == {"vllm:num_requests_running"}


@needs_prometheus
@pytest.mark.parametrize(
    ("age", "running", "asked"),
    [(90, [], 0), (90, [0], 0), (90, [3], 90), (600, [3], 120), (600, [3, 0], 180), (600, [0, 0], 0)],
)
def test_the_age_of_calls_asks_for_one_worker_more_than_have_loaded(
    tmp_path: Path, age: int, running: list[int], asked: int
) -> None:
    """And for none while none runs requests, as while the first one loads."""
    [_, query] = queries(RENDERED["bucket"]["ScaledObject", "inference-worker-qwen"])
    labels = 'namespace="default",job="inference-api",model_name="Qwen/Qwen3-0.6B"'
    series = [{"series": f'pipeline_oldest_request_age_seconds{{{labels},kind="live"}}', "values": str(age)}]
    for worker, count in enumerate(running):
        series += [{"series": f'vllm:num_requests_running{{{labels},worker="w{worker}"}}', "values": str(count)}]
    expected = [{"expr": query, "eval_time": "0m", "exp_samples": [{"labels": "{}", "value": asked}]}]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    (tmp_path / "case.yml").write_text(yaml.safe_dump({"tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "case.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_store_in_a_bucket_needs_no_volume() -> None:
    found = RENDERED["bucket"]
    assert not [name for kind, name in found if kind == "PersistentVolumeClaim"]
    for name in ("api", "jobs"):
        pod, container = pod_of(found["Deployment", f"inference-{name}"])
        assert variables(container)["FILE_STORE"] == "s3://inference/fleet"
        assert variables(container)["AWS_ENDPOINT_URL"] == "https://s3.example.com"
        assert container["envFrom"] == [{"secretRef": {"name": "inference-s3"}}]
        assert [volume["name"] for volume in pod["volumes"]] == ["tmp"]
    assert "FILE_STORE" not in variables(pod_of(found["Deployment", "inference-worker-qwen"])[1])


@of_kind("ScaledObject")
def test_a_worker_that_is_started_from_zero_has_the_time_to_load(example: str, found: Object) -> None:
    scaled = found["spec"]
    deployment = RENDERED[example]["Deployment", scaled["scaleTargetRef"]["name"]]["spec"]
    assert scaled["minReplicaCount"] > 0 or scaled["cooldownPeriod"] >= deployment["progressDeadlineSeconds"]
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"]


@of_kind("PersistentVolumeClaim")
def test_a_claim_stays_when_the_chart_is_uninstalled(example: str, found: Object) -> None:
    assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_what_the_values_say_wins_over_the_chart() -> None:
    found = RENDERED["existing"]
    _, api = pod_of(found["Deployment", "llm-api"])
    [url, _] = api["env"]
    assert url["valueFrom"]["secretKeyRef"] == {"name": "llm-redis", "key": "address-of-the-api"}
    assert found["ScaledObject", "llm-worker-qwen"]["spec"]["cooldownPeriod"] == 2_592_000
    assert found["ScaledObject", "llm-worker-tiny"]["spec"]["triggers"][0]["metadata"]["threshold"] == "1500000"
    tiny, qwen = found["Deployment", "llm-worker-tiny"], found["Deployment", "llm-worker-qwen"]
    assert tiny["spec"]["strategy"] == {"type": "Recreate"}
    assert pod_of(tiny)[1]["resources"] == {"requests": {"cpu": "500m", "memory": "2Gi"}}
    assert pod_of(tiny)[1]["envFrom"] == [{"secretRef": {"name": "llm-proxy"}}]
    assert [variables(pod_of(one)[1])["OMP_NUM_THREADS"] for one in (tiny, qwen)] == ["1", "7"]
    assert "--tensor-parallel-size=4" in pod_of(RENDERED["gpus"]["Deployment", "inference-worker-chat"])[1]["args"]


@pytest.mark.parametrize(("example", "prefix"), [("gpus", "inference"), ("existing", "llm")])
def test_calls_and_batches_wait_for_a_model_that_sleeps_and_for_no_other(example: str, prefix: str) -> None:
    found = RENDERED[example]
    arguments, of_jobs = (pod_of(found["Deployment", f"{prefix}-{name}"])[1]["args"] for name in ("api", "jobs"))
    scaled = [one for (kind, _), one in found.items() if kind == "ScaledObject"]
    asleep = {one["spec"]["scaleTargetRef"]["name"] for one in scaled if one["spec"]["minReplicaCount"] == 0}
    assert asleep
    assert of_jobs[1:] == [one for one in arguments if one.startswith("--on-demand-model=")]
    for (kind, name), one in found.items():
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
