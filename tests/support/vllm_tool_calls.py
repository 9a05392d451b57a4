"""Record what vLLM's own tool parsers read from the texts of `tool_call_texts`.

Needs vLLM, which nothing else here does. In an environment that has it:
`python -m tests.support.vllm_tool_calls > tests/data/vllm_tool_calls.json`.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from tests.workers.text.parsers.tool_call_texts import SEED, TOOLS, OutputText, tool_call_texts

_SPECIAL = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<think>",
    "</think>",
]
_TOKEN = re.compile("|".join(map(re.escape, _SPECIAL)) + "|.", re.DOTALL)
_REQUEST = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="any", tools=TOOLS)


class FamilyVocabulary:
    """A tokenizer with a token for each special text and for each character."""

    def __init__(self, family: str) -> None:
        hidden = {"[ARGS]"} if family == "mistral" else set()  # its absence marks versions before 11
        self._ids = {token: 1_200_000 + index for index, token in enumerate(_SPECIAL) if token not in hidden}

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def tokens(self, text: str) -> list[tuple[str, int]]:
        found = _TOKEN.findall(text)
        return [(token, self._ids.get(token, ord(token[0]))) for token in found]

    def decode(self, token_ids: list[int], **_: Any) -> str:
        texts = {token_id: token for token, token_id in self._ids.items()}
        return "".join(texts.get(token_id) or chr(token_id) for token_id in token_ids)


def main() -> None:
    """Write everything as one JSON object."""
    texts = [{**text._asdict(), **_read(text)} for text in tool_call_texts()]
    print(f'{{"vllm": "{vllm.__version__}", "seed": {SEED}, "texts": [')
    print(",\n".join(json.dumps(text, ensure_ascii=False) for text in texts))
    print("]}")


def _read(text: OutputText) -> dict[str, Any]:
    whole, streamed = _whole(text), _streamed(text)
    return {"whole": whole} if whole == streamed else {"whole": whole, "streamed": streamed}


def _parser(text: OutputText, vocabulary: FamilyVocabulary) -> Any:
    return ToolParserManager.get_tool_parser(text.family.removesuffix("_v11"))(vocabulary, _REQUEST.tools)


def _whole(text: OutputText) -> dict[str, Any]:
    read = _parser(text, FamilyVocabulary(text.family)).extract_tool_calls(text.text, _REQUEST)
    return _answer(read.content, [[call.function.name, call.function.arguments] for call in read.tool_calls])


def _streamed(text: OutputText) -> dict[str, Any]:
    """Read a token at a time, which is a character or a special token."""
    vocabulary = FamilyVocabulary(text.family)
    parser = _parser(text, vocabulary)
    tokens = vocabulary.tokens(text.text)
    content, calls, before = "", [], ""
    for index, (token, token_id) in enumerate(tokens):
        ids = [token_id for _, token_id in tokens[:index]]
        delta = parser.extract_tool_calls_streaming(
            before, before + token, token, ids, [*ids, token_id], [token_id], _REQUEST
        )
        before += token
        content += _add(delta, calls)
    if hasattr(parser, "finish_streaming"):
        content += _add(parser.finish_streaming(), calls)
    elif calls:
        calls[-1][1] += parser.get_remaining_unstreamed_args()
    return _answer(content, calls)


def _add(delta: Any, calls: list[list[str]]) -> str:
    for call in delta.tool_calls or [] if delta is not None else []:
        function = call.function
        while len(calls) <= call.index:
            calls.append(["", ""])
        calls[call.index][0] += function.name or ""
        calls[call.index][1] += function.arguments or ""
    return (delta.content or "") if delta is not None else ""


def _answer(content: str | None, calls: list[list[str]]) -> dict[str, Any]:
    """Arguments are the value of their JSON, or text where they are none."""
    return {"content": (content or "").strip(), "calls": [[name, _value(arguments)] for name, arguments in calls]}


def _value(arguments: str) -> dict[str, Any]:
    try:
        return {"json": json.loads(arguments)}
    except ValueError:
        return {"text": arguments.rstrip()}


if __name__ == "__main__":
    sys.exit(main())
