"""The dtype of a checkpoint, and the dtype that its model computes in."""

from __future__ import annotations

import logging

import torch

from workers.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def stored_dtype(config: ModelConfig) -> torch.dtype:
    return _DTYPES.get(config.dtype or "float32", torch.float32)


def resolve_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that the model computes in.

    "auto" on a GPU: the checkpoint's dtype, but bfloat16 for float32. "auto" on a CPU: bfloat16 for
    a checkpoint in bfloat16 if the CPU has instructions for it, else float32.
    """
    if asked != "auto":
        if device.type == "cpu" and _DTYPES[asked] not in (torch.float32, cpu_dtype()):
            logger.warning("--dtype %s is slow on this CPU, which has no instructions for it; use --dtype auto", asked)
        return _DTYPES[asked]
    stored = stored_dtype(config)
    if device.type != "cpu":
        return torch.bfloat16 if stored == torch.float32 else stored
    return cpu_dtype() if stored == torch.bfloat16 else torch.float32


def cpu_dtype() -> torch.dtype:
    """Return bfloat16 if the CPU has instructions for it, else float32."""
    return torch.bfloat16 if _fast_bfloat16() else torch.float32


def _fast_bfloat16() -> bool:
    # The instructions that torch may use; ATEN_CPU_CAPABILITY can limit them
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
