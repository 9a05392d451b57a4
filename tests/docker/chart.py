"""The objects that the Helm chart makes of its examples, as `docker/helm/rendered/` has them."""

import shutil
from typing import Any

import pytest
import yaml

from tools.helm_chart import EXAMPLES, rendered_file

Object = dict[str, Any]

SECRET_VALUES = {"REDIS_URL": "redis://queue", "PIPELINE_WEBHOOK_SECRET": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3"}
needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="no helm on this machine")


def objects(text: str) -> dict[tuple[str, str], Object]:
    """What a rendered file has, by kind and name."""
    found = [one for one in yaml.safe_load_all(text) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


RENDERED = {path.stem: objects(rendered_file(path).read_text()) for path in EXAMPLES if rendered_file(path).exists()}
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
