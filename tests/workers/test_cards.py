"""What is told of a GPU, where there is one, and what is left out."""

import pytest
import torch

from workers.cards import card_gauges


def test_without_cards_nothing_is_asked() -> None:
    assert card_gauges([]) == []


def test_without_a_driver_or_its_library_nothing_is_told() -> None:
    assert card_gauges(["GPU-00000000-0000-0000-0000-000000000000"]) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_a_card_tells_of_itself() -> None:
    pytest.importorskip("pynvml")
    (card,) = card_gauges([f"GPU-{torch.cuda.get_device_properties(0).uuid}"])
    assert card.name == torch.cuda.get_device_name(0)
    assert card.memory_total is not None
    assert card.memory_total > 0
    assert card.watts is None or 0 < card.watts < 2000
