"""The priority of a call that names a service tier."""

from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.results import ApiError, Choice, Usage
from jobs.protocol.validation import Call, parse_call


def call(**body: Any) -> Call:
    return parse_call(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}], **body})


@pytest.mark.parametrize(
    ("tier", "settled", "priority"),
    [
        (None, None, 0),
        ("auto", "default", 0),
        ("default", "default", 0),
        ("scale", "default", 0),
        ("flex", "flex", 100),
        ("priority", "priority", -100),
    ],
)
def test_a_tier_is_a_priority(tier: str | None, settled: str | None, priority: int) -> None:
    found = call(service_tier=tier)
    assert (found.service_tier, found.priority) == (settled, priority)


def test_a_priority_goes_with_a_tier_that_says_nothing() -> None:
    assert call(service_tier="auto", priority=7).priority == 7
    assert call(service_tier="flex", priority=None).priority == 100
    with pytest.raises(ApiError, match="leave one of them out") as caught:
        call(service_tier="flex", priority=0)
    assert (caught.value.param, caught.value.code) == ("service_tier", "invalid_value")


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(ApiError, match="Supported values are: 'auto', 'default'") as caught:
        call(service_tier="fast")
    assert caught.value.param == "service_tier"


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_bodies_and_chunks_have_the_tier_and_the_fingerprint(url: str) -> None:
    endpoint, head = ENDPOINTS[url], AnswerHead("id", "m", 1, "fp_1", "flex")
    made = [
        endpoint.body(head, [Choice(0, "x", "stop")], Usage()),
        endpoint.chunk(head, 0, endpoint.delta("x", ())),
        endpoint.usage_chunk(head, Usage()),
    ]
    assert [(one["system_fingerprint"], one["service_tier"]) for one in made] == [("fp_1", "flex")] * 3
    assert "service_tier" not in endpoint.usage_chunk(AnswerHead("id", "m", 1), Usage())
