"""The program that fetches an input; `order_process` runs it."""

from pathlib import Path

import msgspec

from pipeline.signals import Signals
from pipeline.uris.addresses import AllowedHosts, parse_allowed
from pipeline.uris.fetching import fetch
from pipeline.uris.order_process import StoreOrder, carry_out, run_order
from pipeline.uris.uri import Uri

_INTERRUPTED = "Interrupted: run the same command again to go on."


class FetchOrder(StoreOrder, frozen=True, kw_only=True):
    """The arguments of `fetch`."""

    path: str
    allowed: str
    has_begun: bool


def run_fetch(uri: Uri, path: Path, allowed: AllowedHosts, has_begun: bool) -> None:
    """Run `fetch` in a separate process. Raise `Refused`, `Unfinished` and `Interrupted`."""
    order = FetchOrder(uri=uri.text, path=str(path), allowed=str(allowed), has_begun=has_begun)
    with Signals() as signals:
        run_order(__name__, order, signals, _INTERRUPTED)


def _fetch(order: FetchOrder) -> None:
    allowed = parse_allowed(order.allowed)
    fetch(Uri(order.uri), Path(order.path), allowed, order.has_begun, lambda line: print(line, flush=True))


if __name__ == "__main__":
    carry_out(msgspec.json.Decoder(FetchOrder), "read", _fetch)
