"""Features of GPUs by compute capability."""

from __future__ import annotations

import torch

_FLOAT8_SINCE = (8, 9)


def has_float8(device: torch.device) -> bool:
    """Return whether a device supports e4m3.

    Devices other than GPUs count as supporting it: torch and Triton's interpreter emulate it.
    """
    if device.type != "cuda":
        return True
    # AMD's version numbers are not compute capabilities, and its float8 has another encoding
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _FLOAT8_SINCE
