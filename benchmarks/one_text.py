"""The time in which `pipeline serve` embeds one text, for a client that sends texts one after
another over one connection.

    python -m benchmarks.one_text --model minilm-l6
"""

import time
from statistics import quantiles

import httpx

from benchmarks.encoders import ENCODERS, texts
from benchmarks.report import arguments, write_report
from benchmarks.servers import running_embeddings

_TOKENS = (16, 32)
_FIRST = 20  # calls that do not count


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=ENCODERS, default="minilm-l6")
    parser.add_argument("--texts", type=int, default=500)
    args = parser.parse_args()
    with running_embeddings(args.model) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        taken = [_embed(client, args.model, text) for text in texts(_FIRST + args.texts, args.seed, _TOKENS)]
    cuts = quantiles(taken[_FIRST:], n=100)
    figures = {"texts": args.texts, "tokens": _TOKENS, "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}
    write_report(f"one-text-{args.model}", figures, args.out, args.seed)


def _embed(client: httpx.Client, model: str, text: str) -> float:
    """Embed a text; return the milliseconds. Raise httpx.HTTPStatusError."""
    began = time.perf_counter()
    client.post("/v1/embeddings", json={"model": model, "input": text}).raise_for_status()
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
