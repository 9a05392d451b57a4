"""Files against what a machine has: a disk that is full, memory that does not grow with a file, a
process that is killed.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import redis

from jobs.queue import keys
from tests.api.test_files import END, KIND, PURPOSE_PART, part
from tests.support.commands import RunningCommand, command, command_environment

_CHUNK = bytes(range(11, 256)) * 4096  # without a line feed: what begins with a bad line is refused
_PAGE = 4096


@contextmanager
def api_process(redis_url: str, store: Path, *prefix: str) -> Iterator[tuple[str, RunningCommand]]:
    """An API in a process of its own, and its address."""
    started = RunningCommand(
        [*prefix, *command("api", "--port", 0, "--file-store", store)], command_environment(redis_url, {})
    )
    try:
        output = started.wait_for("listening on ")
        address = re.search(r"listening on (\S+)", output)
        assert address is not None
        yield address[1], started
    finally:
        started.stop()


def test_a_full_disk_is_a_507_and_leaves_nothing(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """In a mount namespace of its own, on a file system of 75 pages and the marker."""
    mount = f"mount -t tmpfs -o size={76 * _PAGE} none {tmp_path}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True).returncode
    ):
        pytest.skip("this machine does not allow mounting a small file system")
    with (
        api_process(redis_url, tmp_path / "store", "unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" "$@"') as (
            url,
            api,
        ),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2, timeout=60) as client,
    ):
        inside = Path(f"/proc/{api.process.pid}/root{tmp_path}/store/files")
        # Of the last two, the content alone has room
        for size in (2_000_000, 76 * _PAGE, 75 * _PAGE, 74 * _PAGE + 1):
            with pytest.raises(openai.InternalServerError) as caught:
                client.files.create(file=("in.jsonl", b"x" * size), purpose="batch")
            assert (caught.value.status_code, caught.value.code) == (507, "insufficient_storage")
            assert os.listdir(inside) == []
            assert redis_client.zcard(keys.FILE_EXPIRY) == 0
        # More where the client had to send one again
        assert api.output.count("No space left on device") >= 4
        kept = client.files.create(file=("in.jsonl", b"x" * 70 * _PAGE), purpose="batch")
        with pytest.raises(openai.InternalServerError):
            client.files.create(file=("in.jsonl", b"{}".ljust(10 * _PAGE)), purpose="batch")
        assert [file.id for file in client.files.list()] == os.listdir(inside) == [kept.id]
        client.files.delete(kept.id)
        filling = client.files.create(file=("in.jsonl", b"x" * 74 * _PAGE), purpose="batch")
        with pytest.raises(openai.InternalServerError) as caught:
            client.batches.create(input_file_id=filling.id, endpoint="/v1/chat/completions", completion_window="24h")
        assert (caught.value.status_code, caught.value.code) == (507, "insufficient_storage")
        assert client.batches.list().data == []
        assert os.listdir(inside.parent / "batches") == []


@pytest.mark.proof
def test_a_killed_api_leaves_what_the_next_one_does_not_show(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with api_process(redis_url, tmp_path) as (url, api):
        folder = tmp_path / "files"

        def endless() -> Iterator[bytes]:
            yield PURPOSE_PART + part("file", b"", "in.jsonl")[:-2]
            while True:
                yield _CHUNK
                if list(folder.glob("*/content.part")):
                    api.process.kill()

        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/files", content=endless(), headers=KIND, timeout=60)
        api.process.wait()
    assert [path.name for path in folder.glob("*/*")] == ["content.part"]
    with (
        api_process(redis_url, tmp_path) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        assert client.files.list().data == []
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(os.listdir(folder)[0])


@pytest.mark.proof
def test_memory_does_not_grow_with_a_file(redis_url: str, redis_client: redis.Redis, tmp_path: Path) -> None:
    """A file as large as any batch's may be, in and out again."""
    count = 200
    head, tail = PURPOSE_PART + part("file", b"", "in.jsonl")[:-2], b"\r\n" + END
    length = len(head) + count * len(_CHUNK) + len(tail)

    def body() -> Iterator[bytes]:
        yield head
        for _ in range(count):
            yield _CHUNK
        yield tail

    with api_process(redis_url, tmp_path) as (url, api), httpx.Client(base_url=url, timeout=120) as http:
        http.get("/v1/files")
        before = peak_bytes(api)
        answer = http.post("/v1/files", content=body(), headers={**KIND, "content-length": str(length)})
        assert answer.json()["bytes"] == count * len(_CHUNK), answer.text
        digest = hashlib.sha256()
        with http.stream("GET", f"/v1/files/{answer.json()['id']}/content") as content:
            for piece in content.iter_raw():
                digest.update(piece)
        grown = peak_bytes(api) - before
        print(f"{grown / 1e6:.1f} MB more for {length / 1e6:.0f} MB in and out")
    assert digest.hexdigest() == hashlib.sha256(_CHUNK * count).hexdigest()
    assert grown < 32e6


def peak_bytes(api: RunningCommand) -> int:
    """The most memory that the process ever had."""
    status = Path(f"/proc/{api.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024
