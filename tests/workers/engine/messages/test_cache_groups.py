"""How a model's layers are divided into groups, and pages among the groups."""

import pytest

from workers.engine.messages.cache_groups import CacheRule, LayerCache, group_layers

ALL = CacheRule()


def local_and_global(local: int, every: int, window: int = 512, bytes_apart: int = 1) -> list[LayerCache | None]:
    """Return layers with a window and layers that keep all, whose tokens have fewer bytes."""
    narrow = LayerCache(CacheRule(window), 4096, (4, 256))
    return [narrow] * local + [LayerCache(ALL, 4096 // bytes_apart, (4 // bytes_apart, 256))] * every


@pytest.mark.parametrize(
    ("local", "every", "layers_per_page", "columns"),
    [
        pytest.param(0, 28, 28, [1], id="one group"),
        pytest.param(13, 13, 13, [1, 1], id="gemma 2 2b"),
        pytest.param(21, 21, 21, [1, 1], id="gemma 2 9b"),
        pytest.param(22, 4, 2, [11, 2], id="gemma 3 1b"),
        pytest.param(29, 5, 5, [6, 1], id="gemma 3 4b"),
        pytest.param(40, 8, 8, [5, 1], id="gemma 3 12b"),
        pytest.param(52, 10, 5, [11, 2], id="gemma 3 27b"),
        pytest.param(12, 12, 12, [1, 1], id="gpt-oss 20b"),
        pytest.param(24, 8, 8, [3, 1], id="olmo 3 7b"),
    ],
)
def test_pages_are_divided_with_few_columns_and_little_padding(
    local: int, every: int, layers_per_page: int, columns: list[int]
) -> None:
    found = group_layers(local_and_global(local, every), 16)
    assert (found.layers_per_page, [group.columns for group in found.groups]) == (layers_per_page, columns)
    assert (found.grid, found.page_bytes) == (16, layers_per_page * 16 * 4096)
    assert 0 <= found.padding <= 0.05


def test_layers_of_fewer_bytes_have_longer_blocks() -> None:
    found = group_layers(local_and_global(50, 10, bytes_apart=2), 16)
    assert [(group.block_size, group.columns, group.pages) for group in found.groups] == [(16, 5, 10), (32, 1, 1)]
    assert found.grid == 32
    assert found.padding == 0


def test_bytes_that_do_not_divide_are_padding() -> None:
    layers = [LayerCache(CacheRule(512), 3000, (3, 500)), LayerCache(ALL, 1000, (1, 500))]
    found = group_layers(layers, 16)
    assert [group.block_size for group in found.groups] == [16, 32]
    assert found.padding == pytest.approx(1 - 4000 / 4500)


def test_a_layer_that_reads_anothers_keys_is_in_no_group() -> None:
    found = group_layers([*local_and_global(4, 1), None, None, *local_and_global(0, 1)], 16)
    assert [group.layers for group in found.groups] == [(0, 1, 2, 3), (4, 7)]


@pytest.mark.parametrize(
    ("rule", "position", "first"),
    [
        (ALL, 99, 0),
        (CacheRule(window=8), 99, 92),
        (CacheRule(window=8), 3, 0),
        (CacheRule(chunk=32), 99, 96),
        (CacheRule(chunk=32), 95, 64),
    ],
)
def test_a_rule_says_the_first_token_that_is_read(rule: CacheRule, position: int, first: int) -> None:
    assert rule.first_read(position) == first
