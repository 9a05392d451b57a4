"""The service tier of a call: OpenAI's names for priorities."""

from typing import Any

from jobs.protocol import fields

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")

_PRIORITIES = {"flex": 100, "priority": -100}  # the other tiers are "default"


def settle_tier(values: dict[str, Any]) -> None:
    """Resolve, in place, the tier of a call, and set its priority.

    Raise `ApiError` 400 if the tier contradicts a priority in the call.
    """
    tier = values.get("service_tier")
    if tier is None:
        return
    if tier not in _PRIORITIES:
        values["service_tier"] = "default"
        return
    if "priority" in values:
        message = f"'service_tier' {tier!r} and 'priority' both set the priority of the call: leave one of them out."
        fields.fail(message, "service_tier", "invalid_value")
    values["priority"] = _PRIORITIES[tier]
