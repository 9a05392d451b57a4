"""Compute the system fingerprint: everything besides the request that answers depend on."""

from __future__ import annotations

import hashlib

from jobs.version import version
from workers.engine.messages.core import Ready


def system_fingerprint(info: Ready) -> str:
    """Return OpenAI's `system_fingerprint`.

    It is equal for workers of one version that run the same weights with the same arithmetic on one
    kind of device.
    """
    kind = info.device.partition(":")[0]
    arithmetic = (info.dtype, info.cache_dtype, info.quantization, kind, info.backend)
    parts = (version(), info.model_digest, *arithmetic)
    return f"fp_{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:12]}"
