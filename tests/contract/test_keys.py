"""Keys through the official client: a client without one is refused, and none sees what belongs to
another tenant.
"""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from api.settings import ApiSettings
from jobs.store.api_keys import create_key
from tests.contract.calls import lines, submit, upload
from tests.contract.shapes import Recorder
from tests.support.api_server import official_client, plain_client, running_api
from tests.support.redis_server import running_server

ABSENT_FILE, ABSENT_BATCH = "file-0123456789abcdef01234567", "batch_0123456789abcdef01234567"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file store of its own: one with keys asks everybody for one."""
    return tmp_path_factory.mktemp("keys") / "store"


@pytest.fixture(scope="module")
def secrets(store: Path) -> dict[str, str]:
    """By tenant."""
    return {tenant: create_key(str(store), tenant=tenant)[1] for tenant in ("blue", "green", "red")}


@pytest.fixture(scope="module")
def api_url(store: Path, secrets: dict[str, str]) -> Iterator[str]:
    """An API whose batches no worker runs."""
    with running_server() as server, running_api(ApiSettings(redis_url=server.url, file_store=str(store))) as url:
        yield url


@pytest.fixture
def blue(api_url: str, secrets: dict[str, str], recorder: Recorder) -> Iterator[openai.OpenAI]:
    """One tenant."""
    with official_client(api_url, secrets["blue"], recorder) as client:
        yield client


@pytest.fixture
def green(api_url: str, secrets: dict[str, str], recorder: Recorder) -> Iterator[openai.OpenAI]:
    """Another one."""
    with official_client(api_url, secrets["green"], recorder) as client:
        yield client


@pytest.mark.parametrize("key", ["none", "sk-" + "x" * 43])
def test_a_wrong_key_is_a_401(api_url: str, key: str, recorder: Recorder) -> None:
    with official_client(api_url, key, recorder) as client, pytest.raises(openai.AuthenticationError) as caught:
        client.files.list()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic Zm9v", "bearer\tx"])
def test_no_key_is_a_401_everywhere_below_v1(api_url: str, header: str | None) -> None:
    with plain_client(api_url, headers={} if header is None else {"authorization": header}) as http:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/batches"),
            ("GET", "/v1/models"),
            ("POST", "/v1/chat/completions"),
        ):
            answer = http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_files_of_another_tenant_are_unknown(blue: openai.OpenAI, green: openai.OpenAI) -> None:
    file_id = upload(blue, lines("one"))
    assert [file.id for file in blue.files.list()].count(file_id) == 1
    assert file_id not in [file.id for file in green.files.list()]
    for call in (green.files.retrieve, green.files.content, green.files.delete):
        assert refusal(call, file_id) == refusal(call, ABSENT_FILE)
    assert blue.files.retrieve(file_id).id == file_id


def test_batches_of_another_tenant_are_unknown(blue: openai.OpenAI, green: openai.OpenAI) -> None:
    batch_id = submit(blue, lines("one")).id
    assert [batch.id for batch in blue.batches.list()] == [batch_id]
    assert green.batches.list().data == []
    for call in (green.batches.retrieve, green.batches.cancel):
        assert refusal(call, batch_id) == refusal(call, ABSENT_BATCH)
    assert blue.batches.retrieve(batch_id).status == "validating"


def test_a_page_can_begin_after_no_object_of_another_tenant(blue: openai.OpenAI, green: openai.OpenAI) -> None:
    """Whatever the answer is, it shows nothing of the other."""
    theirs = upload(blue, lines("one"))
    mine = upload(green, lines("one"))
    assert theirs not in [file.id for file in green.files.list()]
    assert mine in [file.id for file in green.files.list()]
    for order in ("asc", "desc"):
        assert {file.id for file in green.files.list(after=theirs, order=order)} <= {mine}  # type: ignore[arg-type]


def refusal(call: object, object_id: str) -> tuple[int, str]:
    """What a caller learns of an id, the id itself left out."""
    with pytest.raises(openai.NotFoundError) as caught:
        call(object_id)  # type: ignore[operator]
    return caught.value.status_code, str(caught.value.body).replace(object_id, "ID")
