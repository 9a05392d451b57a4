"""Tiles are measured once, and what is on disk is believed only if it fits."""

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
import triton

from workers.engine.kernels.tuning import ChoiceCache, TileChoice, candidates, tuned

AMONG = candidates("decode", 128, 2, torch.bfloat16)
SECONDS = {
    choice: 2.0 - index if index < 2 else 9.0 for index, choice in enumerate(AMONG)
}  # the second is the quickest


@pytest.fixture
def cache(tmp_path: Path) -> ChoiceCache:
    return ChoiceCache(tmp_path / "new", "a GPU", "source")


def refuse(choice: TileChoice) -> float:
    raise AssertionError("measured again")


def test_the_quickest_is_kept(cache: ChoiceCache) -> None:
    assert tuned(cache, "decode", AMONG, SECONDS.__getitem__) == AMONG[1]
    assert tuned(cache, "decode", AMONG, refuse) == AMONG[1]
    assert tuned(cache, "prefill", AMONG, lambda choice: -SECONDS[choice]) != AMONG[1]
    assert tuned(cache, "decode", AMONG, refuse) == AMONG[1]


def test_what_is_no_candidate_any_more_is_measured_anew(cache: ChoiceCache) -> None:
    tuned(cache, "decode", AMONG, SECONDS.__getitem__)
    assert tuned(cache, "decode", [AMONG[0]], SECONDS.__getitem__) == AMONG[0]


@pytest.mark.parametrize("other", [("another GPU", "source"), ("a GPU", "another source")])
def test_another_gpu_or_source_has_choices_of_its_own(cache: ChoiceCache, other: tuple[str, str]) -> None:
    tuned(cache, "decode", AMONG, SECONDS.__getitem__)
    assert ChoiceCache(cache.path.parent, *other).get("decode", AMONG) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "{}", '{"choices": 3}', '{"card": "a GPU", "choices": {"decode": {}}}', "\x00\xff"]
)
def test_a_file_that_makes_no_sense_is_warned_of_and_replaced(
    cache: ChoiceCache, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.path.parent.mkdir()
    cache.path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert tuned(cache, "decode", AMONG, SECONDS.__getitem__) == AMONG[1]
    assert "ignoring the tuned kernels" in caplog.text
    assert tuned(cache, "decode", AMONG, refuse) == AMONG[1]


def test_a_choice_that_makes_no_sense_is_measured(cache: ChoiceCache) -> None:
    tuned(cache, "decode", AMONG, SECONDS.__getitem__)
    content = json.loads(cache.path.read_text())
    for known in ({"block_m": 1}, [], None, {**content["choices"]["decode"], "warps": 3}):
        cache.path.write_text(json.dumps({**content, "choices": {"decode": known}}))
        assert tuned(cache, "decode", AMONG, SECONDS.__getitem__) == AMONG[1]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        tuned(ChoiceCache(tmp_path / "file" / "new", "a GPU", "source"), "decode", AMONG, SECONDS.__getitem__)
        == AMONG[1]
    )


def test_what_the_gpu_refuses_is_passed_over(cache: ChoiceCache) -> None:
    def measure(choice: TileChoice) -> float:
        if choice != AMONG[2]:
            raise triton.OutOfResources(300_000, 227 << 10, "shared memory")
        return 1.0

    assert tuned(cache, "decode", AMONG, measure) == AMONG[2]
    assert tuned(cache, "prefill", AMONG[:2], measure) == AMONG[0]
    assert cache.get("prefill", AMONG) is None


def test_those_who_start_together_measure_once(cache: ChoiceCache) -> None:
    measured, chosen = [], []
    together = threading.Barrier(4)

    def measure(choice: TileChoice) -> float:
        measured.append(choice)
        return SECONDS[choice]

    def start() -> None:
        together.wait()
        chosen.append(tuned(ChoiceCache(cache.path.parent, "a GPU", "source"), "decode", AMONG, measure))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen == [AMONG[1]] * 4
    assert sorted(map(str, measured)) == sorted(map(str, AMONG))


@pytest.mark.parametrize("group", [1, 7, 8, 71])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_candidates_hold_a_group(kind: str, head_dim: int, dtype: torch.dtype, group: int) -> None:
    found = candidates(kind, head_dim, group, dtype)
    assert len(found) == len(set(found)) > 0
    for choice in found:
        assert choice.block_m >= max(16, group)
        assert choice.tile >= 16
        assert not choice.tile & (choice.tile - 1)
