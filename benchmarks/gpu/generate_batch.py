"""The engine against transformers' own continuous batching, on the same GPU, with the same weights
and requests.
"""

import asyncio
from typing import Any

from benchmarks.gpu.checkpoints import checkpoint
from benchmarks.gpu.engine import GpuPass, config_for, run_pass, warm_up, with_engine
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.workload import Workload, drawn
from benchmarks.report import versions
from workers.engine.client.async_engine import AsyncEngine


def measure(setting: Setting) -> dict[str, Any]:
    """Return the row's figure: our tokens per second over theirs."""
    work = _share(setting)
    folder = checkpoint(setting, "qwen3-0.6b")
    ours = asyncio.run(with_engine(config_for(setting, folder), lambda engine: _ours(engine, setting, work)))
    theirs = _theirs(setting, folder, work)
    return {
        "value": round(ours.tokens_per_second / theirs, 2),
        "tokens_per_second": round(ours.tokens_per_second, 1),
        "generate_batch_tokens_per_second": round(theirs, 1),
        "output_tokens": work.output_tokens,
        "faster_attention": versions("flash-attn", "flash-attn-3", "kernels"),
        "how": (
            f"the {len(work.prompts)} prompts of the first row with {work.output_lengths[0]} greedy tokens each;"
            " theirs: generate_batch of a model loaded with sdpa, which it leaves for a package of `faster_attention`"
            " if there is one, from the first request's start to the last one's end as its results report, its own"
            " warm-up not counted; ours: as in the first row"
        ),
    }


def _share(setting: Setting) -> Workload:
    """Return the benchmark's prompts with short answers, for the row's time limit."""
    prompts = drawn(3, 2, 20, token_limit=150).prompts if setting.tiny else drawn(256, 100, 1024).prompts
    return Workload(prompts, [4 if setting.tiny else 128] * len(prompts))


async def _ours(engine: AsyncEngine, setting: Setting, work: Workload) -> GpuPass:
    await warm_up(engine, setting, len(work.prompts))
    await run_pass(engine, work.with_other_prompts(seed=2), first_id=1 << 21)
    return await run_pass(engine, work)


def _theirs(setting: Setting, folder: str, work: Workload) -> float:
    """Return output tokens per second. Raise RuntimeError if a request got too few tokens."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    dtype = torch.float32 if setting.tiny else torch.bfloat16
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(setting.device).eval()
    )
    lengths = GenerationConfig(max_new_tokens=work.output_lengths[0], do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64) if setting.tiny else None
    for prompts in (work.prompts[:8], work.prompts):  # the first call is a warm-up
        results = list(
            model.generate_batch(prompts, generation_config=lengths, continuous_batching_config=sizes).values()
        )
    if len(results) < len(work.prompts) or any(
        len(result.generated_tokens) != work.output_lengths[0] for result in results
    ):
        raise RuntimeError(
            f"generate_batch answered {len(results)} of {len(work.prompts)} requests, or not with all tokens"
        )
    seconds = max(result.lifespan[1] for result in results) - min(result.lifespan[0] for result in results)
    return work.output_tokens / seconds
