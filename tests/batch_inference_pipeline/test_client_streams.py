"""The client's streams of tokens, over an API whose comments come often."""

import asyncio
import time
from pathlib import Path

import pytest

from api.settings import ApiSettings
from batch_inference_pipeline import AsyncPipeline, batch_handle
from tests.support.api_server import running_api
from tests.support.relay import Relay
from tests.support.waiting import wait_until

PATIENCE = 5.0


def test_a_batch_that_has_no_tokens_for_long_is_still_followed(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_handle, "PATIENCE_SECONDS", PATIENCE)
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), ping_seconds=0.2)

    async def work(relay: Relay) -> None:
        async with AsyncPipeline(base_url=f"{relay.url}/v1") as p:
            batch = await p.open()

            async def follow() -> None:
                async for _ in batch.tokens():
                    pass

            following = asyncio.create_task(follow())

            def streams() -> int:
                return relay.received.count(b"/stream ")

            await asyncio.to_thread(wait_until, lambda: streams() == 1, 60, "the stream")
            began = time.monotonic()
            await asyncio.to_thread(wait_until, lambda: time.monotonic() > began + PATIENCE + 1, 60, "a long silence")
            relay.cut()
            await asyncio.to_thread(wait_until, lambda: following.done() or streams() == 2, 60, "the next stream")
            assert not following.done()
            following.cancel()

    with running_api(settings) as url, Relay(url) as relay:
        asyncio.run(work(relay))
