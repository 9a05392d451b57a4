"""Values of the Helm chart: the schema takes those of the examples and refuses wrong ones."""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.docker.chart import Object, needs_helm
from tools.helm_chart import CHART, EXAMPLES, render

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
    "fullnameOverride=1st": "does not match",
    "servingEngineSpec.modelSpec.0.requestMemory=16ki": "does not match",
    "servingEngineSpec.modelSpec.0.requestCPU=4Gi": "does not match",
    "servingEngineSpec.modelSpec.0.requestCPU=0": "minimum",
    "apiSpec.shutdownTimeout=0": "minimum",
    "fileStore.uri=/srv/store": "does not match",
    "fileStore.uri=s3://key:secret@bucket/prefix": "does not match",
    "servingEngineSpec.modelSpec.0.keda.oldestCallSecondsPerReplica=0": "minimum",
}
TAKEN = (
    *(
        f"servingEngineSpec.modelSpec.0.requestMemory={text}"
        for text in ("16Gi", "1.5Ti", "1Ei", "16G", "1E", "128M", "8k")
    ),
    *(f"servingEngineSpec.modelSpec.0.requestCPU={text}" for text in ("4", "1.5", "500m", "'2'")),
    "fullnameOverride=llm",
    "fileStore.uri=s3://bucket/prefix",
    "redis.url=rediss+sentinel://a:26379,b:26379/main/0",
)
REFUSED_BY_TEMPLATES = {
    "redis.url=redis://:secret@redis:6379/0": "put it into a Secret",
    "redis.url=redis://redis:6379/0?password=secret": "put it into a Secret",
    'servingEngineSpec.modelSpec.0.keda={"minReplicaCount": 0, "cooldownPeriod": 60, "enabled": true}': (
        "keda.cooldownPeriod of the model qwen is below its progressDeadlineSeconds"
    ),
    'redis.url=""': "there is no Redis server: set redis.url, or redis.existingSecret",
    'fileStore={"uri": "s3://bucket/prefix", "existingClaim": "files"}': "fileStore has a uri and an existingClaim",
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


@pytest.mark.parametrize("change", TAKEN)
def test_the_schema_takes_right_values(change: str) -> None:
    _check_values(values_with(change))


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
    jsonschema.validate(merged(values), schema)
