"""The plan holds every line once, keeps prefix groups together and runs long answers first."""

import contextlib
import random
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jobs.batch.plan import PlanBuilder, PlanEntry, Sorter, read_plan
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.pooling_parameters import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE
from tests.support.processes import open_files


def chat(system: str | None, question: str, max_tokens: int | None = None) -> dict[str, Any]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": question}]}
    return body if max_tokens is None else body | {"max_tokens": max_tokens}


def planned(folder: Path, bodies: list[dict[str, Any]], run_records: int = 1000, url: str = "") -> list[int]:
    """Indexes of the bodies in the order of the plan; without a url they are for chats, or else
    completions.
    """
    builder = PlanBuilder(folder, run_records)
    for index, body in enumerate(bodies):
        endpoint = BATCH_ENDPOINTS[url or (CHAT if "messages" in body else COMPLETIONS)]
        builder.add(PlanEntry(index + 1, index * 1000, index), endpoint, "m", body)
    builder.write(str(folder / "plan.bin"))
    with open(folder / "plan.bin", "rb") as file:
        entries = read_plan(file, 0, len(bodies) + 10)
    assert all(entry.offset == (entry.line - 1) * 1000 and entry.length == entry.line - 1 for entry in entries)
    return [entry.line - 1 for entry in entries]


@pytest.mark.parametrize("by_model", [False, True])
def test_lines_of_one_model_come_before_those_of_the_next_where_it_is_asked_for(tmp_path: Path, by_model: bool) -> None:
    builder = PlanBuilder(tmp_path, 7, by_model=by_model)
    for line in range(40):
        body = chat(None, f"question {line}", max_tokens=line)
        builder.add(PlanEntry(line, 0, 0), BATCH_ENDPOINTS[CHAT], "ba"[line % 2], body)
    builder.write(str(tmp_path / "plan.bin"))
    with open(tmp_path / "plan.bin", "rb") as file:
        found = [entry.line for entry in read_plan(file, 0, 50)]
    longest_first = list(range(39, -1, -1))
    assert found == (sorted(longest_first, key=lambda line: line % 2) if by_model else longest_first)


@pytest.mark.parametrize("count", [0, 1, 23, 24, 25, 600, 24 * 24 + 5])
def test_a_sort_keeps_few_files(tmp_path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    records = [rng.randbytes(4) for _ in range(count)]
    with contextlib.closing(Sorter(4, tmp_path, 1)) as sorter:
        for record in records:
            sorter.add(record)
            assert open_files(tmp_path) <= 3 * 24
        assert list(sorter) == sorted(records), seed
        assert list(sorter) == sorted(records)
    assert open_files(tmp_path) == 0


def test_lines_of_one_system_prompt_run_together_long_ones_first(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    systems = [f"You are helper number {n}. " * 20 for n in range(7)]
    bodies = [chat(rng.choice(systems), f"question {n}", rng.randrange(1, 500)) for n in range(300)]
    order = planned(tmp_path, bodies)
    assert sorted(order) == list(range(300))
    groups = [bodies[index]["messages"][0]["content"] for index in order]
    assert sum(left != right for left, right in pairwise(groups)) == 6, seed
    lengths = defaultdict(list)
    for index in order:
        lengths[bodies[index]["messages"][0]["content"]].append(bodies[index]["max_tokens"])
    assert all(found == sorted(found, reverse=True) for found in lengths.values())
    heads = [found[0] for found in lengths.values()]
    assert heads == sorted(heads, reverse=True)


def test_a_shared_document_below_a_shared_system_prompt_stays_together(tmp_path: Path) -> None:
    documents = [f"document {n} " * 400 for n in range(5)]
    bodies = [chat("Answer.", documents[n % 5] + f" question {n}", 10 + n) for n in range(50)]
    order = planned(tmp_path, bodies)
    assert sum(left % 5 != right % 5 for left, right in pairwise(order)) == 4


@pytest.mark.parametrize("length", [64, 120, 200, 300])
@pytest.mark.parametrize("kind", ["prompt", "question", "question below a system message"])
def test_a_short_shared_prefix_stays_together(tmp_path: Path, length: int, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    prefixes = [f"{rng.random()} ".ljust(length, "x") for _ in range(20)]
    texts = [prefixes[n % 20] + f"{rng.random()}" * 40 for n in range(400)]
    system = "Be brief." if kind == "question below a system message" else None
    order = planned(tmp_path, [{"prompt": text} if kind == "prompt" else chat(system, text) for text in texts])
    assert sum(left % 20 != right % 20 for left, right in pairwise(order)) == 19, seed


def test_unrelated_lines_run_longest_first(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": f"{n} is a number " * 30, "max_tokens": (n * 37) % 101} for n in range(100)
    ]
    lengths = [bodies[index]["max_tokens"] for index in planned(tmp_path, bodies)]
    assert lengths == sorted(lengths, reverse=True)


def texts_of(length: int, filler: str = "x") -> dict[str, dict[str, Any]]:
    """A body of each endpoint whose longest text, or pair of texts, has that many bytes."""
    text, short = filler * length, filler
    return {
        EMBEDDINGS: {"input": [short, text]},
        CLASSIFY: {"input": text},
        POOLING: {"input": [[1], [1] * (length // 4)]},
        SCORE: {"text_1": short, "text_2": [text[1:], short]},
        RERANK: {"query": short, "documents": [short, {"text": text[1:]}]},
    }


@pytest.mark.parametrize("url", [EMBEDDINGS, CLASSIFY, POOLING, SCORE, RERANK])
def test_equal_lengths_of_texts_stand_together_longest_first(tmp_path: Path, url: str, seed: int) -> None:
    """However their texts begin, and whatever bounds an answer that is not generated."""
    rng = random.Random(seed)
    lengths = [4 * rng.randrange(2, 60) for _ in range(300)]
    bodies = [texts_of(length, rng.choice("abc"))[url] | {"max_tokens": rng.randrange(99)} for length in lengths]
    assert planned(tmp_path, bodies, url=url) == sorted(range(300), key=lambda i: (-lengths[i], i)), seed


@pytest.mark.parametrize("url", [EMBEDDINGS, SCORE, RERANK])
@pytest.mark.parametrize(
    "value", [None, [], "", [None, 1], [[[]]], {"text": 1}, ["\ud800", "b"], [True, "x"], {"a": {}}]
)
def test_nonsense_among_texts_still_gets_its_place(tmp_path: Path, url: str, value: Any) -> None:
    names = BATCH_ENDPOINTS[url].text_names[0]
    bodies = [dict.fromkeys(names, value), dict.fromkeys(names, "text"), {}]
    assert sorted(planned(tmp_path, bodies, url=url)) == [0, 1, 2]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": [1, 2, 3]},
        {"prompt": ["a", "b"]},
        {"prompt": 7, "max_tokens": "x"},
        {"messages": "no", "max_tokens": -1},
        {"messages": [1, {}]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "\ud800"}]}, None], "max_tokens": 2**70},
    ],
)
def test_nonsense_in_a_body_still_gets_its_place(tmp_path: Path, body: dict[str, Any]) -> None:
    assert sorted(planned(tmp_path, [body, chat(None, "hi"), body])) == [0, 1, 2]


def test_spilling_to_disk_changes_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    bodies = [chat(f"system {rng.randrange(9)}" * 9, f"question {n}", rng.randrange(64)) for n in range(1000)]
    assert planned(tmp_path, bodies, run_records=64) == planned(tmp_path, bodies, run_records=10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.bin"]


def test_the_same_file_gives_the_same_plan(tmp_path: Path) -> None:
    bodies = [chat("same", f"question {n}", 5) for n in range(100)]
    assert planned(tmp_path, bodies) == planned(tmp_path, bodies)


def test_entries_are_read_by_position(tmp_path: Path) -> None:
    order = planned(tmp_path, [{"prompt": "x" * n} for n in range(50)])
    with open(tmp_path / "plan.bin", "rb") as file:
        assert [entry.line - 1 for entry in read_plan(file, 20, 7)] == order[20:27]
        assert [entry.line - 1 for entry in read_plan(file, 48, 7)] == order[48:]
        assert read_plan(file, 50, 7) == []


def test_an_empty_plan(tmp_path: Path) -> None:
    assert planned(tmp_path, []) == []


def test_sorter_may_be_walked_again(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    records = [rng.randbytes(8) for _ in range(1000)]
    sorter = Sorter(8, tmp_path, 77)
    for record in records:
        sorter.add(record)
    assert list(sorter) == sorted(records)
    assert list(sorter) == sorted(records)
    sorter.close()
