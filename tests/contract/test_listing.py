"""Pages of files and of batches, walked through as the official client walks them."""

from typing import Any

import httpx
import openai
import pytest

from tests.contract.calls import CHAT, WINDOW, lines, submit, upload, wait
from tests.contract.test_files import refused
from tests.support.batch_stack import AWAY


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


@pytest.fixture(scope="module")
def in_states(module_client: openai.OpenAI) -> dict[str, list[str]]:
    """Batches by their status, oldest first, some of each between those of another."""
    client, made = module_client, dict[str, list[str]]()
    for _ in range(4):
        made.setdefault("completed", []).append(wait(client, submit(client, lines("one")).id).id)
        made.setdefault("failed", []).append(wait(client, submit(client, lines("one") + b"{\n").id).id)
        made.setdefault("in_progress", []).append(
            wait(client, submit(client, lines("one", model=AWAY)).id, "in_progress").id
        )
    return made


@pytest.fixture
def _all_ended(client: openai.OpenAI, in_states: dict[str, list[str]]) -> None:
    """Wait until no batch changes any more, and gets no files."""
    for batch in client.batches.list(limit=100):
        if batch.id not in in_states["in_progress"]:
            wait(client, batch.id)


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_batches_are_listed_by_status(client: openai.OpenAI, in_states: dict[str, list[str]], limit: int) -> None:
    mine = [batch for ids in in_states.values() for batch in ids]
    for status, ids in in_states.items():
        found = client.batches.list(limit=limit, extra_query={"status": status})
        assert of(mine, found) == ids[::-1]
        assert all(batch.status == status for batch in found)
    two: Any
    for two in ({"status": "failed,in_progress"}, {"status": ["failed", "in_progress"]}):
        expected = sorted(in_states["failed"] + in_states["in_progress"], reverse=True)
        assert of(mine, client.batches.list(limit=limit, extra_query=two)) == expected


@pytest.mark.usefixtures("_all_ended")
def test_a_page_of_batches_of_a_status_is_full_and_says_whether_there_is_more(
    client: openai.OpenAI, in_states: dict[str, list[str]]
) -> None:
    total = len(list(client.batches.list(limit=100, extra_query={"status": "in_progress"})))
    page = client.batches.list(limit=total - 1, extra_query={"status": "in_progress"})
    assert (len(page.data), page.has_more) == (total - 1, True)
    page = client.batches.list(limit=total, extra_query={"status": "in_progress"})
    assert (len(page.data), page.has_more) == (total, False)


@pytest.mark.usefixtures("_all_ended")
def test_what_is_listed_was_created_in_the_time_that_is_asked_for(http: httpx.Client, client: openai.OpenAI) -> None:
    for path, made in (("/v1/files", client.files.list().data), ("/v1/batches", list(client.batches.list(limit=100)))):
        for moment in {one.created_at + step for one in made[::5] for step in (0, 1)}:
            for bound in ("created_after", "created_before"):
                expected = [one.id for one in made if (one.created_at >= moment) == (bound == "created_after")]
                assert walked(http, f"{path}?{bound}={moment}&limit=7") == expected, (path, bound)
        assert walked(http, f"{path}?created_after=9&created_before=9") == []
        assert walked(http, f"{path}?created_before=4294967295&limit=100") == [one.id for one in made]
    ascending = walked(http, f"/v1/files?created_after={made[-1].created_at}&order=asc&limit=7")
    assert ascending == [one.id for one in client.files.list(order="asc") if one.created_at >= made[-1].created_at]


@pytest.mark.usefixtures("_all_ended")
def test_a_place_outside_of_the_time_that_is_asked_for_widens_it_not(http: httpx.Client, client: openai.OpenAI) -> None:
    for path, made in (("/v1/files", client.files.list().data), ("/v1/batches", list(client.batches.list(limit=100)))):
        newest, oldest = made[0], made[-1]
        before = [one.id for one in made if one.created_at < newest.created_at]
        limits = f"created_before={newest.created_at}&limit=100"
        assert walked(http, f"{path}?after={newest.id}&{limits}") == before
        assert walked(http, f"{path}?after={oldest.id}&{limits}") == []
    since = [
        one.id for one in client.files.list(order="asc") if one.created_at >= client.files.list().data[0].created_at
    ]
    first = client.files.list(order="asc").data[0]
    query = f"order=asc&after={first.id}&created_after={client.files.list().data[0].created_at}"
    assert walked(http, f"/v1/files?{query}") == since


def walked(http: httpx.Client, query: str) -> list[str]:
    """The ids of all pages."""
    found, after = list[str](), ""
    while True:
        page = http.get(f"{query}{after}").json()
        found += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            return found
        after = f"&after={page['last_id']}"


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
        ("/v1/batches", "status=done", "status"),
        ("/v1/batches", "status=completed,", "status"),
        ("/v1/batches", "status=completed&status=Failed", "status"),
        ("/v1/batches", "status[]=done", "status"),
        ("/v1/batches", "created_after=yesterday", "created_after"),
        ("/v1/batches", "created_before=-1", "created_before"),
        ("/v1/files", "created_after=1.5", "created_after"),
        ("/v1/files", "created_before=4294967296", "created_before"),
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
