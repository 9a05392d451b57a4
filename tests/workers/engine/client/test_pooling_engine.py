"""Texts become vectors by an engine core in a process of its own."""

import asyncio

import numpy as np
import torch

from tests.workers.engine.models.test_pooling_parity import EMBED, assert_close, pooling_requests
from tests.workers.engine.models.tiny_pooling_models import hidden_states, pooled, pooling_folder
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams

LONG_TEXT = [5] * 200


def test_vectors_come_from_an_engine_beside_aborts_and_refusals() -> None:
    async def scenario() -> None:
        engine = AsyncEngine(
            EngineConfig(model=str(pooling_folder("bert")), device="cpu", dtype="float32", depth=1, threads=1)
        )
        await engine.start(60)
        try:
            assert (engine.info.tasks, engine.info.embedding_size) == (["embed", "token_embed"], 64)
            requests = pooling_requests(EMBED)
            others = [EngineRequest(number, LONG_TEXT, [], SamplingParams(0), pooling=EMBED) for number in (50, 51)]
            engine.add([*requests, *others, EngineRequest(52, [7], [], SamplingParams(3))])
            engine.abort([51])
            ended, vectors = await ended_requests(engine, len(requests) + 3)
        finally:
            await engine.stop()
        assert ended.pop(51) in (Finish.ABORT, Finish.STOP)
        assert ended.pop(52) is Finish.ERROR
        assert set(ended.values()) == {Finish.STOP}
        expected = [pooled(hidden, "mean") for hidden in hidden_states("bert")]
        assert_close([vectors[request.request_id] for request in requests], expected)

    asyncio.run(asyncio.wait_for(scenario(), 120))


async def ended_requests(engine: AsyncEngine, number: int) -> tuple[dict[int, Finish], dict[int, torch.Tensor]]:
    """How so many requests ended, and the vectors of those that have one."""
    ended: dict[int, Finish] = {}
    vectors: dict[int, torch.Tensor] = {}
    async for output in engine.steps():
        assert not output.token_ids
        ended |= {one: Finish(finish) for one, finish in zip(output.request_ids, output.finish, strict=True)}
        vectors |= {one: torch.from_numpy(np.frombuffer(data, "<f4").copy()) for one, data in output.pooled.items()}
        if len(ended) == number:
            break
    return ended, vectors
