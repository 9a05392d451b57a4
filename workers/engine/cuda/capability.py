"""What GPUs can do, by their compute capability."""

from __future__ import annotations

import torch

_FLOAT8_SINCE = (8, 9)


def has_float8(device: torch.device) -> bool:
    """Return whether a device has instructions for e4m3; one that is no GPU has what torch and
    Triton's interpreter do instead.
    """
    if device.type != "cuda":
        return True
    # AMD's numbers are no compute capabilities, and its float8 has another encoding
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _FLOAT8_SINCE
