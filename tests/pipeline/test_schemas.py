"""A process ends at its start, with one sentence, where Redis or the file store has a schema that
its version does not read.
"""

from pathlib import Path

import pytest
import redis

from tests.pipeline.conftest import RunHere

QUEUE_SENTENCE = (
    "Error: The Redis server holds a queue of schema {}, and this version reads schema 3: run the version that wrote it"
    " until no batch and no live call is left, then empty the database, or use another one"
)


@pytest.mark.parametrize("schema", ["2", "4"], ids=["older", "newer"])
@pytest.mark.parametrize("command", ["api", "jobs", "worker", "serve"])
def test_a_queue_of_another_schema_is_refused(
    command: str, schema: str, redis_client: redis.Redis, redis_url: str, run_here: RunHere
) -> None:
    redis_client.set("{q}:schema", schema)
    done = run_here(command, REDIS_URL=redis_url)
    assert done.code == 1
    assert done.err.splitlines()[-1] == QUEUE_SENTENCE.format(schema)
    assert redis_client.keys() == [b"{q}:schema"]


@pytest.mark.parametrize("command", ["api", "jobs", "serve"])
def test_a_file_store_of_another_schema_is_refused(
    command: str, redis_url: str, tmp_path: Path, run_here: RunHere
) -> None:
    (tmp_path / "schema").write_text("2\n")
    done = run_here(command, "--file-store", tmp_path, REDIS_URL=redis_url)
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith(
        f"the file store {tmp_path} has schema 2, and this version reads schema 1: run the version that wrote it, or"
        " use another folder"
    )
