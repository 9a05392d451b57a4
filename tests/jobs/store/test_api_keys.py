"""Keys on disk, and what a server knows of them while they come, go, and cannot be read."""

import os
import re
import time
from pathlib import Path

import pytest

from jobs.store.api_keys import KeyRing, KeysUnreadable, create_key, list_keys, revoke_key
from jobs.store.storage import join, read_bytes, write_bytes
from tests.support.object_stores import files_below
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _keys_are_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.store.api_keys._RECHECK_SECONDS", 0.05)


def test_a_key_is_found_by_its_secret_alone(location: str) -> None:
    record, secret = create_key(location, tenant="a", name="laptop", requests_per_minute=5)
    assert re.fullmatch(r"sk-[A-Za-z0-9_-]{43}", secret)
    ring = KeyRing(location)
    assert ring.look().are_required
    assert ring.look().find(secret) == record
    assert ring.look().find(record.sha256) is None
    assert ring.look().find("") is None
    assert list_keys(location) == [record]


def test_the_secret_is_nowhere_on_disk(location: str) -> None:
    _, secret = create_key(location, tenant="a")
    texts = [read_bytes(join(location, name)) for name in files_below(location)]
    assert len([text for text in texts if text]) == 1
    assert all(secret.encode() not in text for text in texts)


def test_a_server_notices_new_and_revoked_keys(location: str) -> None:
    ring = KeyRing(location)
    assert not ring.look().are_required
    record, secret = create_key(location, tenant="a")
    _, other = create_key(location, tenant="b")
    wait_until(lambda: ring.look().find(secret) == record and ring.look().find(other), 30, "the new keys to be known")
    revoke_key(location, record.id)
    wait_until(lambda: ring.look().find(secret) is None, 30, "the revoked key to be forgotten")
    assert ring.look().find(other)
    with pytest.raises(KeyError):
        revoke_key(location, record.id)


def test_weights_of_a_damaged_record_are_those_that_were_known(location: str) -> None:
    store = location
    create_key(store, tenant="a", weight=2.0)
    newest, _ = create_key(store, tenant="a", weight=3.0)
    ring = KeyRing(store)
    assert ring.look().weights() == {"a": 3.0}
    path = join(location, "keys", f"{newest.id}.json")
    content = read_bytes(path)
    write_bytes(path, b"{")
    create_key(store, tenant="b", weight=5)
    wait_until(lambda: ring.look().weights().get("b"), 30, "the next look")
    assert ring.look().weights() == {"a": 3.0, "b": 5.0}
    write_bytes(path, content.replace(b"3.0", b"4.0"))
    wait_until(lambda: ring.look().weights() == {"a": 4.0, "b": 5.0}, 30, "the mended record")
    revoke_key(store, newest.id)
    wait_until(lambda: ring.look().weights() == {"a": 2.0, "b": 5.0}, 30, "the older key's")


def test_keys_that_settled_are_not_read_again(tmp_path: Path) -> None:
    record, secret = create_key(str(tmp_path), tenant="a")
    folder = tmp_path / "keys"
    os.utime(folder, (time.time() - 60,) * 2)
    ring = KeyRing(str(tmp_path))
    assert ring.look().find(secret)
    (folder / f"{record.id}.json").write_text("{}")  # which does not touch the folder
    ring._next_look = 0.0
    assert ring.look().find(secret)


def test_the_latest_keys_are_those_of_the_last_look(tmp_path: Path) -> None:
    """A server that asks for them never waits for a disk."""
    ring = KeyRing(str(tmp_path))
    assert not ring.look().are_required
    _, secret = create_key(str(tmp_path), tenant="a")
    ring._next_look = 0.0
    assert ring.due
    assert ring.latest.find(secret) is None
    assert ring.look() is ring.latest
    assert ring.latest.find(secret)


@pytest.mark.parametrize("ids", [["x"], ["../keys/key_x"], [""], ["key_" + "0" * 24]])
def test_what_is_no_key_cannot_be_revoked(location: str, ids: list[str]) -> None:
    create_key(location, tenant="a")
    with pytest.raises(KeyError):
        revoke_key(location, ids[0])


@pytest.mark.parametrize("tenant", ["", "a b", "a/b", "a\0", ".a", "ä", "a" * 65])
def test_what_is_no_name_of_a_tenant_is_refused(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        create_key(str(tmp_path), tenant=tenant)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"id": 1}', None])
def test_a_damaged_record_admits_no_request_and_still_requires_a_key(location: str, content: bytes | None) -> None:
    record, secret = create_key(location, tenant="a")
    path = join(location, "keys", f"{record.id}.json")
    damaged = read_bytes(path).replace(record.id.encode(), b"key_" + b"0" * 24) if content is None else content
    write_bytes(path, damaged)
    ring = KeyRing(location)
    assert ring.look().are_required
    assert ring.look().find(secret) is None
    assert list_keys(location) == []
    revoke_key(location, record.id)
    wait_until(lambda: not ring.look().are_required, 30, "the damaged record to be gone")


def test_a_folder_that_cannot_be_read_admits_no_request(tmp_path: Path) -> None:
    _, secret = create_key(str(tmp_path), tenant="a")
    ring = KeyRing(str(tmp_path))
    assert ring.look().find(secret)
    (tmp_path / "keys").rename(tmp_path / "away")

    def refused() -> bool:
        try:
            return not ring.look().find(secret)
        except KeysUnreadable as error:
            return "is gone" in str(error)

    wait_until(refused, 30, "all requests to be refused")
    (tmp_path / "keys").write_text("a file")
    wait_until(lambda: "cannot be read" in failure(ring), 30, "the file to be no folder")
    with pytest.raises(KeysUnreadable):
        list_keys(str(tmp_path))
    (tmp_path / "keys").unlink()
    (tmp_path / "away").rename(tmp_path / "keys")
    wait_until(lambda: not failure(ring), 30, "the folder to be read again")
    assert ring.look().find(secret)


def failure(ring: KeyRing) -> str:
    try:
        ring.look()
    except KeysUnreadable as error:
        return str(error)
    return ""


def test_who_revokes_the_last_key_lets_nobody_in(location: str) -> None:
    ring = KeyRing(location)
    assert not ring.look().exist
    record, _ = create_key(location, tenant="a")
    revoke_key(location, record.id)
    wait_until(lambda: ring.look().exist and not ring.look().are_required, 30, "the next look")
    assert KeyRing(location).look().exist
    assert list_keys(location) == []
