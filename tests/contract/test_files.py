"""Files through the official client: what an upload gives, its content, its end, and everything
that an upload can do wrong.
"""

import io
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.contract.calls import lines, upload
from tests.contract.shapes import Recorder

DAY = 24 * 3600
CONTENT = lines("one", "two")
PART = ("file", ("input.jsonl", CONTENT))


def field(name: str, value: str) -> tuple[str, tuple[None, str]]:
    """A multipart field that is no file."""
    return name, (None, value)


BATCH = field("purpose", "batch")
ANCHOR, SECONDS = field("expires_after[anchor]", "created_at"), field("expires_after[seconds]", "3600")


def test_an_upload_is_a_processed_file_that_goes_after_thirty_days(client: openai.OpenAI) -> None:
    before = int(time.time())
    file = client.files.create(file=("my input.jsonl", CONTENT), purpose="batch")
    assert file.id.startswith("file-")
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(CONTENT),
        "my input.jsonl",
        "batch",
        "processed",
    )
    assert before <= file.created_at <= time.time()
    assert file.expires_at == file.created_at + 30 * DAY
    assert client.files.retrieve(file.id) == file
    assert file.id in [listed.id for listed in client.files.list(purpose="batch")]


def test_waiting_for_its_processing_ends_at_once(client: openai.OpenAI, recorder: Recorder) -> None:
    file_id = upload(client, CONTENT)
    before = recorder.checked
    assert client.files.wait_for_processing(file_id).status == "processed"
    assert recorder.checked == before + 1, "the client looked again"


@pytest.mark.parametrize("purpose", ["assistants", "fine-tune", "user_data"])
def test_files_for_other_purposes_stay(client: openai.OpenAI, purpose: Any) -> None:
    file = client.files.create(file=("notes.txt", b"anything"), purpose=purpose)
    assert (file.purpose, file.expires_at) == (purpose, None)


@pytest.mark.parametrize("kind", ["path", "open file", "bytes", "memory", "with a type"])
def test_every_way_to_name_a_file(client: openai.OpenAI, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(CONTENT)
    with path.open("rb") as opened:
        given: dict[str, Any] = {
            "path": path,
            "open file": opened,
            "bytes": ("input.jsonl", CONTENT),
            "memory": ("input.jsonl", io.BytesIO(CONTENT)),
            "with a type": ("input.jsonl", CONTENT, "application/jsonl"),
        }
        file = client.files.create(file=given[kind], purpose="batch")
    assert (file.filename, client.files.content(file.id).content) == ("input.jsonl", CONTENT)


def test_content_is_what_was_uploaded_and_carries_its_name(client: openai.OpenAI) -> None:
    name = 'an "odd" näme.jsonl'
    file = client.files.create(file=(name, CONTENT), purpose="batch")
    answer = client.files.with_raw_response.content(file.id)
    assert answer.content == CONTENT
    assert answer.headers["content-disposition"].startswith("attachment; filename")
    with client.files.with_streaming_response.content(file.id) as streamed:
        assert b"".join(streamed.iter_bytes(7)) == CONTENT


def test_a_deleted_file_is_gone(client: openai.OpenAI) -> None:
    file_id = upload(client, CONTENT)
    deleted = client.files.delete(file_id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file_id, True, "file")
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            call(file_id)
    assert file_id not in [listed.id for listed in client.files.list(purpose="batch")]


def test_two_files_of_one_name_are_two_files(client: openai.OpenAI) -> None:
    assert upload(client, CONTENT) != upload(client, CONTENT)


@pytest.mark.parametrize("seconds", [3600, 30 * DAY])
def test_a_file_expires_when_its_owner_says(client: openai.OpenAI, seconds: int) -> None:
    file = client.files.create(
        file=PART[1], purpose="batch", expires_after={"anchor": "created_at", "seconds": seconds}
    )
    assert file.expires_at == file.created_at + seconds


@pytest.mark.parametrize(
    "order",
    [
        [PART, BATCH, ANCHOR, SECONDS],
        [SECONDS, ANCHOR, BATCH, PART],
        [BATCH, PART, SECONDS, ANCHOR],
        [ANCHOR, PART, SECONDS, BATCH],
    ],
    ids=["file first", "file last", "file second", "file among them"],
)
def test_fields_may_come_in_any_order(http: httpx.Client, order: Any) -> None:
    file = http.post("/v1/files", files=order).json()
    assert (file["purpose"], file["bytes"], file["expires_at"]) == ("batch", len(CONTENT), file["created_at"] + 3600)


@pytest.mark.parametrize("kind", [None, "application/json"])
@pytest.mark.parametrize("seconds", ["3600", "3600.0"])
def test_the_expiry_may_be_one_part_of_json(http: httpx.Client, kind: str | None, seconds: str) -> None:
    """As clients that were generated from OpenAI's document send it."""
    value = f'{{"anchor": "created_at", "seconds": {seconds}}}'
    part: Any = ("expires_after", (None, value) if kind is None else (None, value, kind))
    file = http.post("/v1/files", files=[BATCH, part, PART]).json()
    assert file["expires_at"] == file["created_at"] + 3600


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    file = client.files.create(
        file=PART[1], purpose="batch", extra_body={"colour": "blue"}, extra_query={"shade": "dark"}
    )
    assert file.bytes == len(CONTENT)


EXPIRY_PART = field("expires_after", '{"anchor": "created_at", "seconds": 3600}')
EXPIRY = [
    ([ANCHOR, field("expires_after[seconds]", "3599")], "expires_after"),
    ([ANCHOR, field("expires_after[seconds]", "2592001")], "expires_after"),
    ([ANCHOR, field("expires_after[seconds]", "soon")], "expires_after"),
    ([ANCHOR, field("expires_after[seconds]", "-3600")], "expires_after"),
    ([ANCHOR, field("expires_after[seconds]", "9" * 400)], "expires_after"),
    ([field("expires_after[anchor]", "now"), SECONDS], "expires_after"),
    ([field("expires_after[anchor]", ""), SECONDS], "expires_after"),
    ([field("expires_after[anchor]", "")], "expires_after"),
    ([field("expires_after", "")], "expires_after"),
    ([field("expires_after", "null")], "expires_after"),
    ([field("expires_after", "3600")], "expires_after"),
    ([field("expires_after", '{"anchor": "created_at"')], "expires_after"),
    ([field("expires_after", '{"anchor": "created_at"}')], "expires_after.seconds"),
    ([field("expires_after", '{"seconds": 3600}')], "expires_after.anchor"),
    ([field("expires_after", '{"anchor": "", "seconds": 3600}')], "expires_after.anchor"),
    ([field("expires_after", '{"anchor": "created_at", "seconds": 1}')], "expires_after.seconds"),
    ([EXPIRY_PART, ANCHOR, SECONDS], "expires_after"),
    ([EXPIRY_PART, EXPIRY_PART], "expires_after"),
    ([field("expires_after.anchor", "created_at"), field("expires_after.seconds", "3600")], "expires_after"),
    ([ANCHOR], "expires_after"),
    ([SECONDS], "expires_after"),
]
UPLOADS: list[tuple[str, Any, str | None]] = [
    ("no file part", [BATCH], "file"),
    ("a file that is a mere field", [BATCH, field("file", "text")], "file"),
    ("two files", [BATCH, PART, PART], "file"),
    ("no purpose", [PART], "purpose"),
    ("an unknown purpose", [PART, field("purpose", "fun")], "purpose"),
    ("the purpose of result files", [PART, field("purpose", "batch_output")], "purpose"),
    ("0 bytes", [BATCH, ("file", ("input.jsonl", b""))], None),
    ("a suffix that no batch has", [BATCH, ("file", ("input.csv", CONTENT))], None),
]


@pytest.mark.parametrize(("fields", "param"), EXPIRY)
def test_an_expiry_out_of_bounds_is_named(http: httpx.Client, fields: Any, param: str) -> None:
    error = refused(http.post("/v1/files", files=[BATCH, PART, *fields]))
    assert error["param"].startswith(param)


@pytest.mark.parametrize(("fields", "param"), [case[1:] for case in UPLOADS], ids=[case[0] for case in UPLOADS])
def test_an_upload_that_lacks_something_is_refused(http: httpx.Client, fields: Any, param: str | None) -> None:
    error = refused(http.post("/v1/files", files=fields))
    assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", None),
        (b"", "multipart/form-data"),
        (b"", "multipart/form-data; boundary=x"),
        (b'{"purpose": "batch"}', "application/json"),
        (b"purpose=batch", "application/x-www-form-urlencoded"),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}',
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\n\r\n\r\n--x--", "multipart/form-data; boundary=x"),
        (b"\xff\xfe\x00", "multipart/form-data; boundary=x"),
    ],
    ids=["nothing", "no boundary", "no parts", "json", "a form", "no end", "a part without a name", "rubbish"],
)
def test_what_is_no_form_is_refused(http: httpx.Client, content: bytes, kind: str | None) -> None:
    refused(http.post("/v1/files", content=content, headers={} if kind is None else {"content-type": kind}))


@pytest.mark.parametrize(
    "name", ["../../etc/input.jsonl", "/etc/input.jsonl", "..\\..\\input.jsonl", "a/b/input.jsonl"]
)
def test_a_path_in_the_name_leads_nowhere(http: httpx.Client, client: openai.OpenAI, name: str) -> None:
    answer = http.post("/v1/files", files=[BATCH, ("file", (name, CONTENT))])
    if answer.status_code == 200:
        assert answer.json()["filename"] == "input.jsonl"
        assert client.files.content(answer.json()["id"]).content == CONTENT
    else:
        refused(answer)


@pytest.mark.parametrize(
    "file_id",
    [
        "file-",
        "file-nonsense",
        "file-0123456789abcdef01234567",
        "batch_0123456789abcdef01234567",
        "..",
        "%2e%2e%2f",
        "file-%00",
        "x" * 5000,
        "file-0123456789abcdef01234567%2Fcontent",
        "näme",
    ],
)
@pytest.mark.parametrize("call", ["GET", "DELETE", "content"])
def test_ids_of_no_file_are_unknown(http: httpx.Client, file_id: str, call: str) -> None:
    method, end = ("GET", "/content") if call == "content" else (call, "")
    answer = http.request(method, f"/v1/files/{file_id}{end}")
    assert answer.status_code in (404, 405), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def refused(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer that must be a 400."""
    assert answer.status_code == 400, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error
