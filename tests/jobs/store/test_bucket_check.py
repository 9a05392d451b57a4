"""A bucket that a file store cannot use is refused at start, in one sentence."""

import json
from datetime import timedelta

import boto3
import pytest

from jobs.store import object_storage
from jobs.store.bucket_check import check_bucket
from jobs.store.storage import StoreError
from tests.support.commands import REPOSITORY
from tests.support.object_stores import CLOUDS, bucket, cloud, environment_of, files_below
from tests.support.ports import reserved_port


@pytest.mark.parametrize("scheme", ["s3", *CLOUDS])
def test_a_bucket_that_can_be_used_is_left_as_it_was(scheme: str) -> None:
    with cloud(scheme) as uri:
        check_bucket(f"{uri}/folder")
        assert files_below(uri) == []


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("read_only", r"bucket store cannot be used \(AccessDenied\): allow these credentials to list it, and to get"),
        ("denied", r"bucket store cannot be used \(AccessDenied\): allow"),
        ("unconditional", r"bucket store has no conditional puts \(If-None-Match and If-Match\), .*: use a store that"),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_bucket_that_cannot_be_used(fault: str, sentence: str, scheme: str) -> None:
    with bucket(scheme) as remote:
        setattr(remote.server, fault, True)
        with pytest.raises(StoreError, match=sentence):
            check_bucket(remote.uri)


@pytest.mark.parametrize("scheme", ["s3", *CLOUDS])
def test_a_bucket_that_is_not_there(scheme: str) -> None:
    with cloud(scheme), pytest.raises(StoreError, match="there is no bucket other: make it, or name another"):
        check_bucket(f"{scheme}://other/folder")


def test_a_bucket_of_no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match=r"set the store's \(AZURE_STORAGE_ACCOUNT_NAME, AZURE"):
        check_bucket("az://of-no-account/folder")


def test_a_bucket_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_storage, "_REQUEST", timedelta(seconds=1))
    with bucket() as remote:
        remote.server.held = "PUT "
        with pytest.raises(StoreError, match="bucket store cannot be used: it did not answer in time"):
            check_bucket(remote.uri)
        remote.server.released.set()


def test_a_server_that_is_not_there() -> None:
    sentence = "bucket store cannot be used: it cannot be reached"
    with reserved_port() as port, environment_of(port), pytest.raises(StoreError, match=sentence):
        check_bucket("s3://store")


def test_a_bucket_takes_the_rule_of_the_documentation() -> None:
    text = (REPOSITORY / "docs" / "deployment.md").read_text()
    rules, _ = json.JSONDecoder().raw_decode(text[text.index('{"Rules"') :])
    with bucket() as remote:
        url = remote.server.environment["AWS_ENDPOINT_URL"]
        client = boto3.client("s3", endpoint_url=url)
        client.put_bucket_lifecycle_configuration(Bucket="store", LifecycleConfiguration=rules)
        [rule] = client.get_bucket_lifecycle_configuration(Bucket="store")["Rules"]
        assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
