"""Both ways of making a step's inputs, on the host and by kernels, against each other and against
what a plan says.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.workers.engine.kernels.compiling import KernelVariant, compiled
from tests.workers.engine.places import needs_interpreter
from workers.engine.attention.base import AttentionMetadata, DeviceMetadata, Metadata
from workers.engine.inputs.base import Inputs
from workers.engine.inputs.host import HostInputs, StepInputs
from workers.engine.kernels import device_inputs
from workers.engine.kernels.device_inputs import DeviceInputs
from workers.engine.kernels.fused_draw import FusedDraw
from workers.engine.messages.cache_groups import CacheGroups, CacheRule, LayerCache, group_layers
from workers.engine.messages.core import SamplingParams
from workers.engine.messages.step import NO_TOKEN, NOT_FINITE, AddedRequest, NewBlocks, StepPlan
from workers.engine.sampling.sampler import Sampler

SLOTS, LENGTH, BLOCK = 11, 90, 8
ONE = group_layers([LayerCache(CacheRule(), 64, (1,))] * 3, BLOCK)
# Three columns, one, and one with twice as many tokens in a page; pages of two layers
SEVERAL = group_layers(
    [
        *[LayerCache(CacheRule(window=9), 64, (1,))] * 6,
        *[LayerCache(CacheRule(), 64, (1,))] * 2,
        *[LayerCache(CacheRule(), 32, (2,))] * 2,
    ],
    BLOCK,
)
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def plans(seed: int, steps: int, groups: CacheGroups = ONE) -> Iterator[StepPlan]:
    """Requests that come with tokens and blocks, advance by a few tokens, and leave, in random
    slots. Rows sample after up to three of their last tokens.
    """
    draw = random.Random(seed)
    known: dict[int, int] = {}
    computed: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for number in range(steps):
        added, new_blocks, rows = [], [], []
        for slot in [slot for slot in known if draw.random() < 0.1]:
            del known[slot]
        for slot in range(SLOTS):
            if slot not in known and draw.random() < 0.3:
                known[slot] = draw.randint(1, 40)
                computed[slot] = blocks[slot] = 0
                tokens = [draw.randrange(1000) for _ in range(known[slot])]
                added.append(AddedRequest(slot, tokens, draw.randint(1, known[slot]), SamplingParams(1)))
        for slot in draw.sample(sorted(known), len(known)):
            count = min(known[slot] - computed[slot], draw.choice([1, 2, 30, 40]))
            end = computed[slot] + count
            if end >= LENGTH:
                continue
            need = -(-end // groups.grid) - blocks[slot]
            if need > 0:
                new_blocks += [
                    NewBlocks(slot, blocks[slot], [draw.randrange(1, 500) for _ in range(need * group.pages)], number)
                    for number, group in enumerate(groups.groups)
                ]
                blocks[slot] += need
            samples = draw.randint(1, min(count, 3, SLOTS - len(rows))) if end == known[slot] else 0
            rows.append((slot, computed[slot], count, samples))
            computed[slot] = end
            known[slot] += end == known[slot]
        if rows:
            slots, starts, counts, samples = (np.array(column, np.int32) for column in zip(*rows, strict=True))
            yield StepPlan(number, added, new_blocks, slots, starts, counts, samples)


def assert_same(made: StepInputs, expected: StepInputs, plan: StepPlan) -> None:
    for name in ("input_ids", "positions", "lengths", "last"):
        assert getattr(made, name).dtype == torch.int64
        assert torch.equal(getattr(made, name).cpu(), getattr(expected, name).cpu()), name
    assert made.slots.tolist() == expected.slots.tolist()
    assert made.ends.tolist() == expected.ends.tolist()


def assert_same_column(made: Metadata, expected: Metadata, plan: StepPlan, block_size: int) -> None:
    assert isinstance(made, DeviceMetadata)
    assert isinstance(expected, AttentionMetadata)
    assert torch.equal(made.slot_mapping.cpu(), expected.slot_mapping.cpu())
    assert made.query_start.tolist() == expected.query_start.tolist()
    assert made.context_lens.tolist() == expected.context_lens.tolist()
    assert made.slots.tolist() == plan.slots.tolist()
    for row, context in enumerate(made.context_lens.tolist()):
        used = -(-context // block_size)
        table = made.block_tables[plan.slots[row], :used]
        assert table.tolist() == expected.block_tables[row, :used].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [ONE, SEVERAL], ids=["one-group", "several-groups"])
@pytest.mark.parametrize("buffer_words", [1 << 18, 96])
def test_made_on_the_device_as_on_the_host(
    buffer_words: int, groups: CacheGroups, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a buffer holds too little for a step, and where a step is taken twice."""
    monkeypatch.setattr(device_inputs, "_BUFFER_WORDS", buffer_words)
    monkeypatch.setattr(device_inputs, "_MOST_VALUES", min(buffer_words // 2, device_inputs._MOST_VALUES))
    monkeypatch.setattr(device_inputs.kernels, "CHUNK", 16)
    seed = 3
    print(f"seed {seed}")
    draw = random.Random(seed)
    on_host = HostInputs(SLOTS, LENGTH, groups, torch.device(device))
    on_device = DeviceInputs(SLOTS, LENGTH, groups, torch.device(device))
    for plan in plans(seed, 8, groups):
        expected, made = on_host.take(plan), on_device.take(plan)
        if draw.random() < 0.2:
            made = on_device.take(plan)
        assert_same(made, expected, plan)
        for column in zip(made.metadata, expected.metadata, groups.columns, strict=True):
            assert_same_column(*column[:2], plan, column[2].block_size)
        sampled = torch.tensor(
            [draw.randrange(1000) for _ in range(len(expected.last))], dtype=torch.int64, device=device
        )
        if len(sampled):
            on_host.store(sampled)
            on_device.store(sampled)
            assert on_device.result(len(sampled)).tolist() == on_host.result(len(sampled)).tolist() == sampled.tolist()
        assert torch.equal(on_device.tokens, on_host.tokens)
        assert (
            on_device.prompt_lengths.tolist()
            == on_host.prompt_lengths.tolist()
            == on_device.device_prompt_lengths.tolist()
        )


@pytest.mark.parametrize("kind", [HostInputs, pytest.param(DeviceInputs, marks=needs_interpreter)])
def test_each_column_has_its_own_pages_of_a_block(kind: type[Inputs]) -> None:
    """A page of the last column has the tokens of two pages of the others."""
    assert [group.pages for group in SEVERAL.groups] == [6, 2, 1]
    inputs, one = kind(SLOTS, LENGTH, SEVERAL, torch.device("cpu")), np.ones(1, np.int32)  # type: ignore[call-arg]
    blocks = [
        NewBlocks(7, 0, [30, 31, 40, 41, 50, 51, 32, 33, 42, 43, 52, 53], 0),
        NewBlocks(7, 1, [62, 63], 1),
        NewBlocks(7, 0, [70, 71], 2),
    ]
    made = inputs.take(StepPlan(0, [], blocks, 7 * one, 25 * one, one, one))
    assert [column.slot_mapping.tolist() for column in made.metadata] == [
        [page * BLOCK + 1] for page in (33, 43, 53, 63)
    ] + [[71 * 2 * BLOCK + 9]]
    assert [len({id(column.prepared) for column in made.metadata})] == [5 if kind is HostInputs else 3]


@pytest.mark.parametrize("device", DEVICES)
def test_padding_goes_to_the_null_block_and_nowhere_else(device: str) -> None:
    """A step of three rows padded to eleven, behind a step whose rows are still in the buffer."""
    inputs = DeviceInputs(SLOTS, LENGTH, ONE, torch.device(device))
    for plan in plans(1, 4):
        inputs.take(plan)
    before = inputs.tokens.clone()
    slots = np.array([4, 9, 2], np.int32)
    ones = np.ones(3, np.int32)
    blocks = [NewBlocks(slot, 0, [10 * slot, 10 * slot + 1]) for slot in slots.tolist()]
    inputs.stage(StepPlan(9, [], blocks, slots, 9 * ones, ones, ones), SLOTS)
    made = inputs.build(SLOTS, SLOTS, 1, LENGTH, SLOTS)
    padding = SLOTS - 3
    (metadata,) = made.metadata
    assert isinstance(metadata, DeviceMetadata)
    assert metadata.slot_mapping.tolist() == [41 * BLOCK + 1, 91 * BLOCK + 1, 21 * BLOCK + 1, *([0] * padding)]
    assert metadata.context_lens.tolist() == [10, 10, 10, *([0] * padding)]
    assert metadata.query_start.tolist() == list(range(SLOTS + 1))
    assert metadata.slots.tolist() == [4, 9, 2, *([0] * padding)]
    assert made.input_ids.tolist() == [*before[slots, 9].tolist(), *([0] * padding)]
    assert made.positions.tolist() == [9, 9, 9, *([0] * padding)]
    assert made.slots.tolist() == [4, 9, 2, *([SLOTS] * padding)]
    assert made.ends.tolist() == [10, 10, 10, *([1] * padding)]
    inputs.store(torch.arange(100, 100 + SLOTS, dtype=torch.int32, device=device))
    before[slots, 10] = torch.tensor([100, 101, 102], dtype=torch.int32, device=device)
    assert torch.equal(inputs.tokens, before)
    assert inputs.result(3).tolist() == [100, 101, 102]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [HostInputs, DeviceInputs])
def test_the_next_step_finds_a_token_where_none_was_drawn(kind: type[Inputs], device: str) -> None:
    inputs, one = kind(SLOTS, LENGTH, ONE, torch.device(device)), np.ones(2, np.int32)  # type: ignore[call-arg]
    added = [AddedRequest(slot, [5, 6], 1, SamplingParams(1)) for slot in (0, 1)]
    blocks = [NewBlocks(slot, 0, [slot + 1]) for slot in (0, 1)]
    inputs.take(StepPlan(0, added, blocks, np.arange(2, dtype=np.int32), 0 * one, 2 * one, one))
    inputs.store(torch.tensor([NO_TOKEN, NOT_FINITE], dtype=torch.int32, device=device))
    assert inputs.result(2).tolist() == [NO_TOKEN, NOT_FINITE]
    assert inputs.tokens[:2, 2].tolist() == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_sampled_for_no_request(device: str) -> None:
    """Padding draws the likeliest token, where the first slot would draw any of 600."""
    drawn = SamplingParams(1, temperature=1.0, top_p=0.99, seed=3)
    inputs = DeviceInputs(SLOTS, LENGTH, ONE, torch.device(device))
    sampler = Sampler(SLOTS, 600, FusedDraw(SLOTS, 600, torch.device(device)))
    for slot in range(SLOTS):
        sampler.set(slot, drawn)
    sampler.upload()
    one = np.ones(1, np.int32)
    plan = StepPlan(0, [AddedRequest(0, [5, 6], 1, drawn)], [NewBlocks(0, 0, [1])], 0 * one, one, one, one)
    inputs.stage(plan, SLOTS)
    made = inputs.build(SLOTS, SLOTS, 1, LENGTH, SLOTS)
    logits = torch.zeros((SLOTS, 600), device=device)
    logits[:, 77] = 0.1
    first, *padding = sampler.draw_static(logits, made.slots, made.ends, made.prompt_lengths).tolist()
    assert padding == [77] * (SLOTS - 1)
    assert first != 77


@pytest.mark.proof
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability: int) -> None:
    tables = {"staged": "*i32", "tokens": "*i32", "columns": "i32"}
    slots = {"block_tables": "*i32", "prompt_lengths": "*i32", "max_blocks": "i32"}
    built = {
        "num_slots": "i32",
        "of_tokens": "*i64",
        "token_stride": "i32",
        "of_rows": "*i32",
        "row_stride": "i32",
    }
    built |= {"last": "*i64"}
    module = device_inputs.kernels.__name__
    variants = [KernelVariant(module, "_apply_runs", tables | slots, {"ROWS": 1024, "PROGRAMS": 64})]
    variants += [
        KernelVariant(module, "_build", tables | slots | built, {"BLOCK_SIZES": sizes, "ROWS": 1024, "BLOCK": block})
        for block in (1, 128)
        for sizes in ((16,), (16, 16, 32))
    ]
    stored = {"number": "i32", "results": "*i32"}
    variants += [
        KernelVariant(module, "_store", tables | stored | {"sampled": kind}, {"ROWS": 1024, "BLOCK": 128})
        for kind in ("*i32", "*i64")
    ]
    assert all(code.spilled == 0 for code in compiled(variants, capability))
