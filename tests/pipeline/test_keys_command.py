"""`pipeline keys`: what it prints, and that what it makes opens the API."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from api.settings import ApiSettings
from jobs.control.upkeep import Upkeep
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key, revoke_key
from jobs.store.key_usage import FILE, save_usage
from pipeline.commands.api import check_open
from pipeline.errors import Refused
from tests.pipeline.conftest import RunHere
from tests.support import http_calls
from tests.support.api_server import official_client, running_api
from tests.support.commands import running_pipeline
from tests.support.waiting import wait_until


def test_a_key_comes_is_listed_and_goes(run_here: RunHere, tmp_path: Path, redis_url: str) -> None:
    store = ("--file-store", tmp_path)
    made = run_here("keys", "create", "--tenant", "acme", "--name", "nightly", "--requests-per-minute", "1k", *store)
    assert made.code == 0, made.err
    secret = made.out.strip()
    assert re.fullmatch(r"sk-[A-Za-z0-9_-]{43}", secret)
    key_id = re.match(r"key_[0-9a-f]{24}", made.err)
    assert key_id is not None
    listed = run_here("keys", "list", *store)
    assert all(text in listed.out for text in (key_id[0], "acme", "nightly", "1,000"))
    assert secret not in listed.out
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path))) as url:

        def status() -> int:
            return http_calls.get(f"{url}/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code

        run_here("keys", "create", *store)
        assert status() == 200
        assert run_here("keys", "revoke", key_id[0], *store).code == 0
        wait_until(lambda: status() == 401, 30, "the revoked key to be refused")
    last = json.loads(run_here("keys", "list", "--json", *store).out)[0]["id"]
    assert "that was the last key" in run_here("keys", "revoke", last, *store).err
    assert run_here("keys", "revoke", key_id[0], *store) == (
        2,
        "",
        f"Error: there is no key {key_id[0]} in {tmp_path}\n",
    )


def test_a_weight_is_listed_and_reaches_the_queue_also_after_it_lost_all(
    run_here: RunHere, tmp_path: Path, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.control.upkeep.WEIGHTS_SECONDS", 0)
    store = ("--file-store", tmp_path)
    queue = Queue(redis_client)
    for tenant, weight in (("acme", "2"), ("acme", "2.5"), ("acme", None), ("other", None)):
        chosen = () if weight is None else ("--weight", weight)
        assert run_here("keys", "create", "--tenant", tenant, *chosen, *store).code == 0
    listed = json.loads(run_here("keys", "list", "--json", *store).out)
    assert [key["weight"] for key in listed] == [2.0, 2.5, None, None]
    assert "2.5" in run_here("keys", "list", *store).out
    for _ in range(2):
        Upkeep(queue, str(tmp_path)).run_once()
        assert redis_client.hgetall(keys.WEIGHTS) == {b"acme": b"2.5"}, "that of the newest key that names one"
        redis_client.flushall()
    upkeep = Upkeep(queue, str(tmp_path))
    upkeep.run_once()
    run_here("keys", "revoke", listed[1]["id"], *store)
    wait_until(lambda: upkeep.run_once() or redis_client.hget(keys.WEIGHTS, "acme") == b"2", 30, "the older key's")


def test_weights_stay_while_the_keys_cannot_be_read(
    tmp_path: Path, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.control.upkeep.WEIGHTS_SECONDS", 0)
    create_key(str(tmp_path), tenant="acme", weight=2)
    upkeep = Upkeep(Queue(redis_client), str(tmp_path))
    upkeep.run_once()
    shutil.rmtree(tmp_path / "keys")
    wait_until(lambda: upkeep.run_once() or "failed to publish the weights" in caplog.text, 30, "the next look")
    assert redis_client.hgetall(keys.WEIGHTS) == {b"acme": b"2"}


def test_a_full_redis_gets_the_weights_once_it_has_room(
    tmp_path: Path, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds up no other upkeep, and is logged once."""
    monkeypatch.setattr("jobs.control.upkeep.WEIGHTS_SECONDS", 0)
    monkeypatch.setattr("jobs.control.upkeep.SWEEP_SECONDS", 0)
    upkeep = Upkeep(Queue(redis_client), str(tmp_path))
    upkeep.run_once()
    create_key(str(tmp_path), tenant="acme", weight=2)
    redis_client.config_set("maxmemory", "1")
    try:
        wait_until(lambda: upkeep.run_once() or "failed to publish the weights" in caplog.text, 30, "the refusal")
        upkeep.run_once()
        assert caplog.text.count("failed to publish") == 1
        assert redis_client.exists(keys.WEIGHTS, keys.LIVE_WEIGHTS) == 0
    finally:
        redis_client.config_set("maxmemory", "0")
    upkeep.run_once()
    assert redis_client.hgetall(keys.WEIGHTS) == {b"acme": b"2"}
    assert redis_client.hlen(keys.LIVE_WEIGHTS) == 1


def test_weights_that_stay_are_not_written_again(
    tmp_path: Path, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.control.upkeep.WEIGHTS_SECONDS", 0)
    create_key(str(tmp_path), tenant="acme", weight=2)
    upkeep = Upkeep(Queue(redis_client), str(tmp_path))
    upkeep.run_once()
    redis_client.config_resetstat()
    for _ in range(3):
        upkeep.run_once()
    assert not {"cmdstat_hset", "cmdstat_del", "cmdstat_hgetall"} & redis_client.info("commandstats").keys()
    redis_client.flushall()
    upkeep.run_once()
    assert redis_client.hgetall(keys.WEIGHTS) == {b"acme": b"2"}, "a new Redis gets them"


def test_a_server_that_nobody_may_use_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = str(tmp_path)
    check_open(ApiSettings(host="127.0.0.1", file_store=store))
    record, _ = create_key(store, tenant="a")
    check_open(ApiSettings(host="0.0.0.0", file_store=store))
    assert caplog.messages == []
    revoke_key(store, record.id)
    check_open(ApiSettings(host="127.0.0.1", file_store=store))
    assert "every API key is revoked" in caplog.text
    with pytest.raises(Refused, match="there is no API key"):
        check_open(ApiSettings(host="0.0.0.0", file_store=store))
    check_open(ApiSettings(host="0.0.0.0", insecure=True, file_store=store))


def test_programs_get_json(run_here: RunHere, tmp_path: Path) -> None:
    store = ("--file-store", tmp_path, "--json")
    assert json.loads(run_here("keys", "list", *store).out) == []
    made = json.loads(run_here("keys", "create", "--queued-tokens", "5m", *store).out)
    listed = json.loads(run_here("keys", "list", *store).out)
    assert made.pop("secret").startswith("sk-")
    assert listed == [made]
    assert (made["tenant"], made["queued_tokens"], made["requests_per_minute"], made["open_batches"]) == (
        "default",
        5_000_000,
        None,
        None,
    )
    assert "sha256" not in made


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["create", "--tenant", "a b"], "a tenant is named by"),
        (["create", "--requests-per-minute", "0"], "below 1"),
        (["create", "--open-batches", "1000000000001"], "from 1 to 1,000,000,000,000"),
        (["create", "--weight", "0"], "0 is not in the range 0.01<=x<=100"),
        (["create", "--weight", "101"], "101.0 is not in the range"),
        (["create", "--weight", "nan"], "a weight is a number from 0.01 to 100, not nan"),
        (["create", "--weight", "heavy"], "'heavy' is not a valid float"),
        (["create", "--name", "\udcff"], "surrogates"),
        (["create", "--file-store", "ftp://bucket/x"], "its URI must begin with s3://, gs:// or az://"),
        (["revoke"], "Missing argument"),
        (["revoke", "../x"], "there is no key ../x"),
    ],
)
def test_what_cannot_be_done_is_refused(run_here: RunHere, tmp_path: Path, arguments: list[str], reason: str) -> None:
    code, _, stderr = run_here("keys", *arguments, FILE_STORE=str(tmp_path))
    assert code == 2
    assert reason in stderr
    assert not (tmp_path / "keys").exists()  # which would close an open server


def usage_of(run_here: RunHere, store: Path) -> dict[str, Any]:
    """The usage of the only key, as `keys list` shows it."""
    [key] = json.loads(run_here("keys", "list", "--json", "--file-store", store).out)
    usage: dict[str, Any] = key["usage"]
    return usage


def test_what_was_computed_is_listed_and_outlives_redis(
    run_here: RunHere, tmp_path: Path, redis_client: redis.Redis
) -> None:
    record, _ = create_key(str(tmp_path), tenant="acme")
    assert usage_of(run_here, tmp_path) == {"input_tokens": 0, "output_tokens": 0, "device_seconds": 0.0}
    counted = {"prompt_tokens": 1200, "completion_tokens": 30, "device_microseconds": 2_500_000}
    for times in (1, 2, 3):
        for name, count in counted.items():
            redis_client.hincrby(keys.KEY_USAGE, f"{record.id} {name}", count)
        for _ in range(2):
            Upkeep(Queue(redis_client), str(tmp_path)).run_once()
        shown = {"input_tokens": times * 1200, "output_tokens": times * 30, "device_seconds": times * 2.5}
        assert usage_of(run_here, tmp_path) == shown
        redis_client.flushall()
        Upkeep(Queue(redis_client), str(tmp_path)).run_once()
    assert "3,600" in run_here("keys", "list", "--file-store", tmp_path).out


def test_usage_that_cannot_be_read_is_left_alone(
    run_here: RunHere, tmp_path: Path, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    create_key(str(tmp_path), tenant="acme")
    (tmp_path / FILE).write_text("{")
    for shown in ((), ("--all",)):
        listed = run_here("keys", "list", *shown, "--file-store", tmp_path)
        assert (listed.code, listed.err.count("\n"), listed.out.count("unknown")) == (0, 1, 3)
        assert f"{tmp_path / FILE} is damaged" in listed.err
    assert json.loads(run_here("keys", "list", "--json", "--file-store", tmp_path).out)[0]["usage"] is None
    Upkeep(Queue(redis_client), str(tmp_path)).run_once()
    assert "failed to save the usage of API keys" in caplog.text
    assert ((tmp_path / FILE).read_text(), redis_client.exists(keys.KEY_USAGE)) == ("{", 0)


def test_what_was_computed_for_revoked_keys_is_listed(run_here: RunHere, tmp_path: Path) -> None:
    store = ("--file-store", tmp_path)
    revoked, other = (create_key(str(tmp_path), tenant="acme")[0].id for _ in range(2))
    save_usage(tmp_path, {revoked: {"prompt_tokens": 1234}, other: {"prompt_tokens": 5}})
    revoke_key(str(tmp_path), revoked)
    assert [key["id"] for key in json.loads(run_here("keys", "list", "--json", *store).out)] == [other]
    listed = json.loads(run_here("keys", "list", "--all", "--json", *store).out)
    assert [(key["id"], key["usage"]["input_tokens"]) for key in listed] == [(other, 5), (revoked, 1234)]
    assert revoked not in run_here("keys", "list", *store).out
    shown = run_here("keys", "list", "--all", *store).out
    assert all(text in shown for text in (revoked, "revoked", "1,234"))
    revoke_key(str(tmp_path), other)
    assert "there is no key" in run_here("keys", "list", *store).err
    assert len(json.loads(run_here("keys", "list", "--all", "--json", *store).out)) == 2


@pytest.mark.proof
def test_a_key_is_charged_for_its_batches_and_live_calls(run_here: RunHere, tmp_path: Path) -> None:
    """By a fleet with the demo model; the usage of a batch is in its object."""
    store = tmp_path / "store"
    _, secret = create_key(str(store), tenant="acme")
    flags = ("--port", 0, "--dtype", "float32", "--file-store", store)
    with running_pipeline("serve", *flags) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        with official_client(found[1], secret) as client:
            wait_until(lambda: http_calls.get(f"{found[1]}/ready").status_code == 200, 120, "the model to be served")
            say: Any = [{"role": "user", "content": "Count from 6 to 13."}]
            live = client.chat.completions.create(model="demo", messages=say, stop=["11"]).usage
            file = client.files.create(file=("in.jsonl", b"\n".join(_lines(say, 20))), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 120, "the batch")
            usage = client.batches.retrieve(batch.id).usage
            assert usage is not None
            assert live is not None
            tokens = usage.input_tokens + live.prompt_tokens, usage.output_tokens + live.completion_tokens

            def charged() -> dict[str, Any] | None:
                shown = usage_of(run_here, store)
                return shown if (shown["input_tokens"], shown["output_tokens"]) == tokens else None

            wait_until(lambda: charged() is not None, 60, "the usage to be saved")
            of_batch = usage.to_dict()["device_seconds"]
            assert 0.0 < of_batch < (charged() or {})["device_seconds"]  # type: ignore[operator]


def _lines(messages: Any, count: int) -> Iterator[bytes]:
    for number in range(count):
        body = {"model": "demo", "messages": messages, "temperature": 1, "seed": number}
        line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line).encode()
