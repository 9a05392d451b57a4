"""Start an engine core and run a self-test on it."""

from __future__ import annotations

import logging

from workers.engine.client.async_engine import AsyncEngine, EngineDeadError
from workers.engine.messages.core import EngineRequest, Finish, PoolingParams, Ready, SamplingParams
from workers.replica.quarantine import HARMLESS_TOKENS

logger = logging.getLogger(__name__)

_SELF_TEST_LENGTH = 15  # tokens; less than a KV cache block, so that none of it is cached


async def start_engine(engine: AsyncEngine, timeout: float, longest_at_death: int) -> None:
    """Start the core and test it.

    `longest_at_death` is the token count of the longest request of an earlier core when it crashed,
    or 0. Raises EngineStartError or EngineDeadError.
    """
    await engine.start(timeout)
    info = engine.info
    logger.debug(
        "engine on %s: backend %s, %d blocks of %d tokens; weights read in %.1f s",
        *(info.device, info.backend, info.num_blocks, info.block_size, info.weights_seconds),
    )
    await _run_self_test(engine, longest_at_death)


def described(info: Ready) -> str:
    """Return where the engine runs, and what it has room for."""
    weights = f" with weights in {info.quantization}" if info.quantization else ""
    return (
        f"on {info.device}, computes in {info.dtype}{weights}; {info.max_num_seqs} requests at once, context of"
        f" {info.max_model_len:,} tokens, KV cache of {info.cache_tokens:,} tokens in"
        f" {info.cache_dtype}"
    )


async def _run_self_test(engine: AsyncEngine, longest_at_death: int) -> None:
    """Run a self-test request before any claim, so that no request is dead-lettered for a device
    that always fails.

    After a crash it is as long as the longest request of the crashed core, and it generates the
    tokens that release a request from quarantine: a core that fails here too fails at that length.
    The request also loads what the first request would wait for, and starts the estimate of step
    times.
    """
    length, tokens = (longest_at_death, HARMLESS_TOKENS) if longest_at_death else (_SELF_TEST_LENGTH, 2)
    tokens = min(tokens, engine.info.max_model_len - 1)
    if tokens <= 0:
        return
    prompt = [0] * min(length, engine.info.max_model_len - tokens)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    try:
        problem = await _error_of(engine, EngineRequest(0, prompt, [], sampling, pooling=_pooling(engine.info)))
    except EngineDeadError as error:
        if not error.by_itself:
            raise
        raise EngineDeadError(
            f"an engine core failed at a harmless request of {len(prompt) + tokens} tokens, so the device or the"
            f" installation is at fault, not a request: {error}",
            error.returncode,
        ) from error
    if problem is not None:
        message = f"the engine core failed at the first request, which was the worker's own: {problem}"
        raise EngineDeadError(message, None)


def _pooling(info: Ready) -> PoolingParams | None:
    """Return the pooling parameters of the self-test for a model that does not generate."""
    return None if "generate" in info.tasks else PoolingParams("embed" if "embed" in info.tasks else "classify")


async def _error_of(engine: AsyncEngine, request: EngineRequest) -> str | None:
    """Run a request alone, to its end; return its error, if any.

    Numbers that are not finite are no error of the core: other prompts may have better ones.
    """
    engine.add([request])
    async for output in engine.steps():
        if Finish.NOT_FINITE in output.finish:
            logger.warning(
                "the model computes NaN or infinity for a prompt of token 0, in %s: requests may fail",
                engine.info.dtype,
            )
            return None
        if any(output.finish):
            return output.errors.get(request.request_id)
    return None
