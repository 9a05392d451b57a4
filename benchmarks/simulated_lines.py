"""Lines of a batch and their answers, for benchmarks of the queue without an engine."""

from functools import cache

from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.requests import Claim, Delta, Finished, Request, TokenChunk
from jobs.protocol.results import Choice, Result, Usage, encode_json

MODEL = "simulated"
_URL = "/v1/completions"
_PROMPT_TOKENS = 100
_FIRST_ID = 1_000  # of tokens: the frequent ids of a vocabulary take three bytes
_WORD = " word"  # the text of one token


def request_of(line: int, tokens: int) -> Request:
    """Return a request of some 500 bytes for `tokens` output tokens."""
    body = f'{{"model":"{MODEL}","max_tokens":{tokens},"ignore_eos":true,"prompt":"{_WORD * (_PROMPT_TOKENS - 10)}"}}'
    return Request(_URL, MODEL, body.encode(), line, f"line-{line}")


def delta_of(claim: Claim, before: int, total: int) -> Delta:
    """Return tokens `before` to `total`; earlier ones were published under the same lease."""
    return Delta(claim.key, claim.fence, total, _chunks(before, total), continues=before > 0)


def finished_of(claim: Claim, published: int, tokens: int) -> Finished:
    """Return the end of a line with `tokens` tokens, `published` of them published before."""
    return Finished(claim.key, claim.fence, _result(tokens), delta_of(claim, published, tokens))


@cache
def _chunks(before: int, total: int) -> list[TokenChunk]:
    ids = [_FIRST_ID + position for position in range(before, total)]
    return [TokenChunk(0, before, ids, _WORD * len(ids), before * len(_WORD))]


@cache
def _result(tokens: int) -> Result:
    usage, endpoint = Usage(_PROMPT_TOKENS, tokens), ENDPOINTS[_URL]
    answer = endpoint.body(AnswerHead(f"{endpoint.id_prefix}1", MODEL, 1), [Choice(0, _WORD * tokens, "length")], usage)
    return Result(200, encode_json(answer), usage, "req_1")
