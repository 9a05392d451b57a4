"""The served document says of calls what the validator takes, and of a server what holds for it."""

import httpx
import pytest

from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.validation import body_schema


@pytest.mark.parametrize("url", ENDPOINTS)
def test_a_body_is_that_of_the_validator(http: httpx.Client, url: str) -> None:
    operation = http.get("/openapi.json").json()["paths"][url]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == body_schema(url)
    assert body_schema(url)["properties"]["seed"]["maximum"] == 2**63 - 1


def test_a_key_may_be_left_out_and_the_windows_are_the_servers_own(http: httpx.Client) -> None:
    operation = http.get("/openapi.json").json()["paths"]["/v1/batches"]["post"]
    assert {} in operation["security"]
    assert len(operation["security"]) == 2
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["completion_window"]["enum"] == ["24h"]
