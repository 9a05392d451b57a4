"""Pages of files and of batches, walked through as the official client walks them."""

from typing import Any

import httpx
import openai
import pytest

from tests.contract.calls import CHAT, WINDOW, lines, upload
from tests.contract.test_files import refused


@pytest.fixture(scope="module")
def files(module_client: openai.OpenAI) -> list[str]:
    """Five files, oldest first; no other test has files of this purpose."""
    return [module_client.files.create(file=(f"{number}.bin", b"x"), purpose="vision").id for number in range(5)]


@pytest.fixture(scope="module")
def batches(module_client: openai.OpenAI) -> list[str]:
    """Twenty-three batches, oldest first."""
    file_id = upload(module_client, lines("one"))
    create = module_client.batches.create
    return [create(input_file_id=file_id, endpoint=CHAT, completion_window=WINDOW).id for _ in range(23)]


def test_files_come_newest_first_and_the_other_way_round(client: openai.OpenAI, files: list[str]) -> None:
    assert of(files, client.files.list(purpose="vision")) == files[::-1]
    assert of(files, client.files.list(purpose="vision", order="desc")) == files[::-1]
    assert of(files, client.files.list(purpose="vision", order="asc")) == files
    assert of(files, client.files.list()) == files[::-1]
    assert of(files, client.files.list(purpose="fine-tune")) == []


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 10_000])
def test_pages_of_files_follow_each_other(client: openai.OpenAI, files: list[str], order: Any, limit: int) -> None:
    assert of(files, client.files.list(purpose="vision", order=order, limit=limit)) == (
        files if order == "asc" else files[::-1]
    )


def test_a_page_says_whether_there_is_more(client: openai.OpenAI, files: list[str]) -> None:
    page = client.files.list(purpose="vision", order="asc", limit=len(files) - 1)
    assert page.has_more is True
    assert page.has_next_page()
    rest = page.get_next_page()
    assert ([file.id for file in rest.data], rest.has_more) == (files[-1:], False)
    assert client.files.list(purpose="vision", order="asc", after=files[-1]).data == []


def test_pages_of_files_stay_what_they_are_while_others_come_and_go(client: openai.OpenAI) -> None:
    mine = [client.files.create(file=("x.bin", b"x"), purpose="assistants").id for _ in range(5)]
    seen = []
    for file in client.files.list(purpose="assistants", limit=2):
        seen.append(file.id)
        client.files.create(file=("new.bin", b"x"), purpose="assistants")
        if file.id == mine[3]:
            # The last of its page, so the next one begins after a file that is gone
            client.files.delete(file.id)
    assert [file_id for file_id in seen if file_id in mine] == mine[::-1]


def test_batches_come_newest_first_and_twenty_at_a_time(client: openai.OpenAI, batches: list[str]) -> None:
    page = client.batches.list()
    assert len(page.data) == 20
    assert page.has_more is True
    assert of(batches, page) == batches[::-1]
    created = [batch.created_at for batch in client.batches.list(limit=100)]
    assert created == sorted(created, reverse=True)


@pytest.mark.parametrize("limit", [7, 100])
def test_pages_of_batches_follow_each_other(client: openai.OpenAI, batches: list[str], limit: int) -> None:
    assert of(batches, client.batches.list(limit=limit)) == batches[::-1]


def test_pages_of_batches_stay_what_they_are_while_others_come(client: openai.OpenAI, batches: list[str]) -> None:
    file_id = upload(client, lines("one"))
    seen = []
    for number, batch in enumerate(client.batches.list(limit=9)):
        seen.append(batch.id)
        if number % 9 == 0:
            client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=WINDOW)
    assert [batch_id for batch_id in seen if batch_id in batches] == batches[::-1]


async def walk(api_url: str) -> list[str]:
    """The ids of all batches, as the asynchronous client finds them."""
    async with openai.AsyncOpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        return [batch.id async for batch in client.batches.list(limit=10)]


def test_the_asynchronous_client_walks_them_as_well(stack: Any, batches: list[str]) -> None:
    import asyncio

    assert [batch_id for batch_id in asyncio.run(walk(stack.api_url)) if batch_id in batches] == batches[::-1]


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/v1/files", "limit=0", "limit"),
        ("/v1/files", "limit=10001", "limit"),
        ("/v1/files", "limit=many", "limit"),
        ("/v1/files", "limit=", "limit"),
        ("/v1/files", "limit=1.5", "limit"),
        ("/v1/files", "limit=" + "9" * 400, "limit"),
        ("/v1/files", "order=up", "order"),
        ("/v1/batches", "limit=0", "limit"),
        ("/v1/batches", "limit=-1", "limit"),
        ("/v1/batches", "limit=101", "limit"),
        ("/v1/batches", "limit=many", "limit"),
        ("/v1/files", "after=nonsense", "after"),
        ("/v1/batches", "after=nonsense", "after"),
        ("/v1/batches", "after=file-0123456789abcdef01234567", "after"),
    ],
)
def test_a_page_that_cannot_be_is_refused(http: httpx.Client, path: str, query: str, param: str) -> None:
    assert refused(http.get(f"{path}?{query}"))["param"] == param


def test_unknown_parameters_are_ignored(client: openai.OpenAI, files: list[str]) -> None:
    assert of(files, client.files.list(purpose="vision", extra_query={"colour": "blue"})) == files[::-1]


def of(mine: list[str], pages: Any) -> list[str]:
    """Those of the listed ids that are ours; iterating over a page goes on with the pages after
    it.
    """
    return [item.id for item in pages if item.id in set(mine)]
