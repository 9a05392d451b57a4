"""Temporary errors: the same call may succeed later."""

import sys

_PASSING = (408, 425, 429)
_CUTS = (("httpx2", "RequestError"), ("h11", "LocalProtocolError"))  # h11: a file grew while it was sent


def is_passing(error: Exception) -> bool:
    """Return whether the same call may succeed a little later."""
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code in _PASSING
    return isinstance(error, openai.APIConnectionError) or is_cut(error)


def is_cut(error: Exception) -> bool:
    """Return whether a connection ended in the middle of a call."""
    return any(isinstance(error, getattr(sys.modules[module], name)) for module, name in _CUTS if module in sys.modules)
