"""`docs/backup.md` as it is written: a backup of a fleet at work, restored in another folder with
an empty Redis; of a bucket, and of Redis. What was acknowledged before the backup is there, and
each line ends once.
"""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import redis

from jobs.batch.rebuild import rebuild_all
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key
from jobs.store.marker import MARKER
from jobs.store.storage import exists, path_of
from tests.support import http_calls
from tests.support.api_server import official_client
from tests.support.batch_steps import answer_all, run_to_end, step
from tests.support.commands import REPOSITORY, run_pipeline, running_pipeline
from tests.support.control_plane import failing
from tests.support.object_stores import bucket
from tests.support.ports import reserved_port
from tests.support.redis_server import running_server
from tests.support.sentinels import ServerProcess
from tests.support.store_batches import check_every_line_once, log_of, serve, under_way
from tests.support.waiting import wait_until

PAGE = REPOSITORY / "docs" / "backup.md"
CHAT = "/v1/chat/completions"
ENDED = ("completed", "cancelled", "failed", "expired")
WAIT_SECONDS = 240
needs_aws = pytest.mark.skipif(shutil.which("aws") is None, reason="no `aws` on this machine")
needs_redis_cli = pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no `redis-cli` on this machine")


def blocks(heading: str) -> list[str]:
    """The shell examples below a heading of the page, without the names of folders."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [block for block in found if not block.startswith("export ")]


def shell(script: str, refused: bool = False, **folders: object) -> str:
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **{name: str(at) for name, at in folders.items()}},
        capture_output=True, text=True, timeout=WAIT_SECONDS,
    )  # fmt: skip
    print(done.stderr)
    assert (done.returncode != 0) == refused
    return done.stdout


def lines(name: str, count: int, tokens: int) -> list[dict[str, object]]:
    """Requests that run to their last token."""
    say = [{"role": "user", "content": f"Count from 6 to 13, {name}."}]
    body = {"model": "demo", "messages": say, "max_tokens": tokens, "ignore_eos": True, "temperature": 1}
    return [
        {"custom_id": f"{name}-{number}", "method": "POST", "url": CHAT, "body": {**body, "seed": number}}
        for number in range(count)
    ]


def jsonl(requests: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


@contextmanager
def serving(store: Path, redis_url: str, secret: str) -> Iterator[openai.OpenAI]:
    """A client of a fleet on one machine, whose model is served."""
    flags = ("--port", 0, "--dtype", "float32", "--max-num-seqs", 16, "--file-store", store)
    with running_pipeline("serve", *flags, redis_url=redis_url) as command:
        found = re.search(r"listening on (http://\S+)", command.wait_for("listening on"))
        assert found is not None
        wait_until(
            lambda: http_calls.get(f"{found[1]}/ready").status_code == 200, WAIT_SECONDS, "the model to be served"
        )
        with official_client(found[1], secret) as client:
            yield client


class ClientWork:
    """What a client got an answer to before the backup, and more that goes on during it."""

    def __init__(self, client: openai.OpenAI, secret: str) -> None:
        self._client = client
        self._http = httpx.Client(
            base_url=str(client.base_url), headers={"authorization": f"Bearer {secret}"}, timeout=http_calls.SECONDS
        )
        self.expected: dict[str, set[str]] = {}  # by batch: the lines that it took
        self.open = str(self._post("batches", {"input": "stream"})["id"])
        self.expected[self.open] = set()
        self.file = client.files.create(file=("kept.jsonl", jsonl(lines("kept", 3, 4))), purpose="batch")
        content = jsonl(lines("parts", 2, 4))
        self.upload = client.uploads.create(
            bytes=len(content), filename="parts.jsonl", mime_type="application/jsonl", purpose="batch"
        ).id
        self.parts = [client.uploads.parts.create(self.upload, data=content).id]
        self.ended = self.create("ended", 5, 4)
        self.wait(self.ended)
        self.cancelled = self.create("cancelled", 400, 1000)
        wait_until(lambda: client.batches.retrieve(self.cancelled).status == "in_progress", WAIT_SECONDS, "its lines")
        client.batches.cancel(self.cancelled)
        self.running = self.create("running", 400, 60)
        self.append("early", 40)
        wait_until(lambda: self._completed(self.running) > 0, WAIT_SECONDS, "results of a batch that runs")
        self.named = {"ended": self.ended, "cancelled": self.cancelled, "running": self.running}
        self.create("new", 40, 20)

    def create(self, name: str, count: int, tokens: int) -> str:
        requests = lines(name, count, tokens)
        file = self._client.files.create(file=(f"{name}.jsonl", jsonl(requests)), purpose="batch")
        batch = self._client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
        self.expected[batch] = {str(request["custom_id"]) for request in requests}
        return batch

    def append(self, name: str, count: int) -> None:
        """Append to the open batch; what this returns for is acknowledged."""
        requests = lines(name, count, 8)
        answer = self._http.post(f"batches/{self.open}/requests", content=jsonl(requests)).raise_for_status()
        assert answer.json()["appended"] == count
        self.expected[self.open] |= {str(request["custom_id"]) for request in requests}

    @contextmanager
    def more(self) -> Iterator[None]:
        """Clients create, append, cancel and delete all the while, and batches end."""
        over, failures = threading.Event(), list[BaseException]()

        def go_on() -> None:
            number = 0
            try:
                while not over.is_set():
                    number += 1
                    self.append(f"during-{number}", 5)
                    file = self._client.files.create(file=("deleted.jsonl", jsonl(lines("x", 1, 4))), purpose="batch")
                    self._client.files.delete(file.id)
                    batch = self.create(f"while-{number}", 4, 4)
                    if number % 3 == 0:
                        self._http.post(f"batches/{batch}/cancel")
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert failures == []

    def wait(self, batch: str) -> openai.types.Batch:
        wait_until(lambda: self._client.batches.retrieve(batch).status in ENDED, WAIT_SECONDS, f"the end of {batch}")
        return self._client.batches.retrieve(batch)

    def _completed(self, batch: str) -> int:
        counts = self._client.batches.retrieve(batch).request_counts
        return 0 if counts is None else counts.completed

    def _post(self, path: str, body: dict[str, str]) -> dict[str, object]:
        answer = self._http.post(path, json={"endpoint": CHAT, "completion_window": "24h", **body})
        made: dict[str, object] = answer.raise_for_status().json()
        return made


def ids_of(client: openai.OpenAI, batch: openai.types.Batch) -> list[str]:
    """Of the lines of both result files."""
    files = [file for file in (batch.output_file_id, batch.error_file_id) if file]
    content = b"".join(client.files.content(file).content for file in files)
    return [json.loads(line)["custom_id"] for line in content.splitlines()]


def check_end(
    client: openai.OpenAI, batch_id: str, acknowledged: set[str], may_have: set[str], may_be_unread: bool = False
) -> None:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, WAIT_SECONDS, f"the end of {batch_id}")
    batch = client.batches.retrieve(batch_id)
    if may_be_unread and batch.status == "cancelled" and batch.in_progress_at is None:
        acknowledged = may_have = set()  # it was cancelled before its input was read, and so has no lines
    found = ids_of(client, batch)
    assert len(found) == len(set(found)), "no line twice"
    assert acknowledged <= set(found) <= may_have


@pytest.mark.proof
def test_a_backup_of_a_fleet_at_work_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    store, backup, restored = (tmp_path / name for name in ("store", "backup", "restored"))
    _, secret = create_key(str(store), tenant="acme")
    [copy], [restore], [look] = blocks("Back up"), blocks("Restore"), blocks("Check")
    with running_server() as server:
        with serving(store, server.url, secret) as client:
            work = ClientWork(client, secret)
            before = {batch: set(ids) for batch, ids in work.expected.items()}
            with work.more():
                assert shell(copy, STORE=store, BACKUP=backup) == f"{backup} is complete\n"
            kept = client.files.content(work.file.id).content
        shell(restore, BACKUP=backup, RESTORED=restored)
        shell(restore, refused=True, BACKUP=store, RESTORED=restored)  # the folder is there
        for command in (("jobs",), ("api", "--port", "0")):
            refused = run_pipeline(*command, "--file-store", restored, redis_url=server.url)
            assert refused.returncode != 0
            assert f"the file store {restored} has no file store_id" in refused.stderr
    batches = len(list((backup / "batches").iterdir()))
    assert int(shell(look, BACKUP=backup).split()[0]) == batches >= len(before)
    with running_server() as server, serving(restored, server.url, secret) as client:
        assert client.files.content(work.file.id).content == kept
        assert client.uploads.complete(work.upload, part_ids=work.parts).status == "completed"
        wait_until(lambda: is_known(client, work.open), WAIT_SECONDS, "the batches to be rebuilt")
        http_calls.post(
            f"{client.base_url}batches/{work.open}/close", headers={"authorization": f"Bearer {secret}"}
        ).raise_for_status()
        for batch, acknowledged in before.items():
            check_end(client, batch, acknowledged, work.expected[batch])
        assert {name: client.batches.retrieve(batch).status for name, batch in work.named.items()} == {
            "ended": "completed",
            "cancelled": "cancelled",
            "running": "completed",
        }
        for listed in client.batches.list(limit=100):  # those of after the backup began are whole, too
            ids = work.expected[listed.id]
            acknowledged = set() if listed.id == work.open else ids
            check_end(client, listed.id, acknowledged, ids, may_be_unread=listed.id not in before)


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    """A store with keys and a file, without batches."""
    create_key(str(tmp_path / "store"), tenant="acme")
    (tmp_path / "store" / MARKER).touch()
    (tmp_path / "store" / "files").mkdir()
    (tmp_path / "store" / "files" / "content").write_bytes(bytes(1_000_000))
    return tmp_path / "store"


def test_a_store_without_batches_is_copied(small_store: Path, tmp_path: Path) -> None:
    [copy], [restore], [look] = blocks("Back up"), blocks("Restore"), blocks("Check")
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    (small_store / "batches").mkdir()
    assert shell(copy, STORE=small_store, BACKUP=backup) == f"{backup} is complete\n"
    assert shell(look, BACKUP=backup).split() == ["0", "1"]
    shell(restore, BACKUP=backup, RESTORED=restored)
    for path in (path for path in small_store.rglob("*") if path.is_file() and path.name != MARKER):
        copied = restored / path.relative_to(small_store)
        assert (copied.read_bytes(), copied.stat().st_mtime_ns) == (path.read_bytes(), path.stat().st_mtime_ns)
    assert not (restored / MARKER).exists()
    shell(copy, refused=True, STORE=small_store, BACKUP=backup)  # each backup is a new folder
    shell(copy, refused=True, STORE=tmp_path, BACKUP=tmp_path / "other")  # no store
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("folder", ["files", "batches/batch_1"])
def test_a_copy_that_fails_is_noticed(small_store: Path, tmp_path: Path, folder: str) -> None:
    """No file of the backup may have more than 64 KiB here."""
    [copy] = blocks("Back up")
    (small_store / "batches").mkdir()
    (small_store / "files").rename(small_store / folder)
    assert shell(f"ulimit -f 64\n{copy}", refused=True, STORE=small_store, BACKUP=tmp_path / "backup") == ""


@pytest.mark.proof
@needs_aws
def test_a_bucket_is_copied_and_restored_with_an_empty_redis(redis_client: redis.Redis) -> None:
    copy, restore = blocks("A bucket")
    with bucket() as remote:
        for name in ("backup", "other"):
            remote.server.put(name)
        names = {"STORE": f"{remote.uri}/store", "BACKUP": "s3://backup/day", "RESTORED": "s3://other/store"}
        record = under_way(redis_client, path_of(remote.uri))
        shell(copy, refused=True, STORE=names["RESTORED"], BACKUP=names["BACKUP"])  # no store
        seen = log_of(record)
        assert len(seen) > 0
        remote.server.read_only = True
        assert shell(copy, refused=True, **names) == ""
        remote.server.read_only = False
        assert shell(copy, **names) == "s3://backup/day is complete\n"
        run_to_end(redis_client, record.id)  # the copy has nothing of it
        shell(restore, **names)
        shell(restore, refused=True, **names)
        assert not exists(f"{names['RESTORED']}/{MARKER}")
        redis_client.flushall()
        serve(redis_client, "m")
        assert rebuild_all(Queue(redis_client), names["RESTORED"]) == (1, [])
        ended = run_to_end(redis_client, record.id, failing(3))
        assert log_of(ended).startswith(seen)
        check_every_line_once(redis_client, path_of("s3://other"), ended, 20)


@needs_redis_cli
def test_a_redis_of_before_is_restored_beside_the_store_of_later(tmp_path: Path) -> None:
    [dump] = blocks("Redis")
    copied = tmp_path / "copied.rdb"
    with reserved_port() as port:
        server = ServerProcess(tmp_path / "redis", port, "--save", "")
        wait_until(server.answers, WAIT_SECONDS, "Redis to answer")
        with closing(redis.Redis(port=port)) as client:
            record = under_way(client, tmp_path)
            shell(dump, REDIS_URL=f"redis://127.0.0.1:{port}/0", DUMP=copied)
            answer_all(client, failing(3), most=4)
            step(client, record.id)
            server.kill()
            shutil.copy(copied, tmp_path / "redis" / "dump.rdb")
            server.start()
            wait_until(server.answers, WAIT_SECONDS, "Redis to have loaded its file")
            ended = run_to_end(client, record.id, failing(3))
            check_every_line_once(client, tmp_path, ended, 20)
        server.kill()


def is_known(client: openai.OpenAI, batch: str) -> bool:
    try:
        return bool(client.batches.retrieve(batch).id)
    except openai.APIStatusError:
        return False
