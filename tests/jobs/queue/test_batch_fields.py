"""The record of a batch: what is written is what is read."""

import msgspec
import pytest
import redis

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.unknown_members import UnknownMember
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields, BatchStatus
from jobs.queue.request_queue import Queue

VALUES = {
    int: 7,
    float: 1_700_000_000_123.0,
    bool: True,
    list[str]: ["m", "a/b"],
    list[UnknownMember]: [UnknownMember("max_token", 3, "max_tokens")],
    dict[str, float]: {"created": 1.25},
    dict[str, DefaultParameters]: {"m": {"top_k": 20, "temperature": 0.5}},
}


def changes() -> dict[str, object]:
    """A value for each field, other than its default."""
    found = {field.name: VALUES.get(field.type, "text") for field in msgspec.structs.fields(BatchFields)}
    times = {"expires_at": 5.5, "appended_at": 6.5}
    states = {"state": "in_progress", "outcome": "expired", "risk": "late"}
    return {**found, **times, **states, "open_models": [], "defaults": {"m": {"temperature": 0.5}}}


def test_every_field_is_read_as_it_was_written(queue: Queue) -> None:
    queue.create_batch("batch_a", 0, fields=changes() | {"state": "validating"})
    queue.transition("batch_a", ["validating"], "in_progress")
    found = queue.batch_fields("batch_a")
    expected = changes() | {"token": found.token, "timestamps": {"created": 1.25, "expires": 5.5, "appended": 6.5}}
    assert found == BatchFields().changed(expected)


def test_no_field_of_these_values_is_its_default() -> None:
    assert all(getattr(BatchFields(), name) != value for name, value in changes().items())


def test_a_changed_record_keeps_the_times_that_are_not_named() -> None:
    first = BatchFields(timestamps={"created": 1.0})
    assert first.changed({"timestamps": {"failed": 2.0}}).timestamps == {"created": 1.0, "failed": 2.0}


def test_what_the_control_plane_reads_of_active_batches(queue: Queue) -> None:
    fields = {"timestamps": {"created": 1.0}, "expires_at": 9.0, "passed_over": ["m"], "spec": "{}"}
    queue.create_batch("batch_a", 3, fields=fields)
    queue.announce("", "batch_a", listed=False, runs=True)
    queue.announce("", "batch_gone", listed=False, runs=True)
    found = queue.active_batches()
    whole = queue.batch_fields("batch_a")
    assert found.keys() == {"batch_a", "batch_gone"}
    assert (found["batch_a"].expires_at, found["batch_a"].passed_over) == (9.0, ["m"])
    assert all(getattr(found["batch_a"], name) == getattr(whole, name) for name in BatchStatus.__struct_fields__)
    assert not found["batch_gone"].exists


def test_a_name_that_is_no_field_is_refused(queue: Queue) -> None:
    with pytest.raises(TypeError, match="unknown fields of a batch's record: complete, stats"):
        queue.create_batch("batch_a", 3, fields={"complete": 1, "stats": 2})
    assert not queue.batch_fields("batch_a").exists


def test_fields_of_another_version_are_left_alone(queue: Queue, redis_client: redis.Redis) -> None:
    queue.create_batch("batch_a", 3)
    redis_client.hset(keys.batch("batch_a"), "a_field_to_come", "x")
    queue.transition("batch_a", ["validating"], "in_progress")
    assert queue.batch_fields("batch_a").state == "in_progress"
    assert redis_client.hget(keys.batch("batch_a"), "a_field_to_come") == b"x"
