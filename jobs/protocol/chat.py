"""`/v1/chat/completions`, in OpenAI's shapes with vLLM's `stop_reason` and `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jobs.protocol import fields
from jobs.protocol.endpoint import AnswerHead, ChoiceEnd, TextEndpoint
from jobs.protocol.logprobs import TextOffsets, chat_logprobs, prompt_logprobs
from jobs.protocol.messages import deltas_of, message_of
from jobs.protocol.prompts import MESSAGES, read_messages
from jobs.protocol.results import Choice, PositionLogprobs, Usage

if TYPE_CHECKING:
    from jobs.protocol.requests import TokenChunk

CHAT = "/v1/chat/completions"


class ChatEndpoint(TextEndpoint):
    """Messages in, a message out."""

    url = CHAT
    is_chat = True
    usual_tokens = 512
    prompt_field = "messages"
    prompt_schema = MESSAGES
    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def body_of_text(self, text: str) -> dict[str, Any]:
        return {self.prompt_field: [{"role": "user", "content": text}]}

    def check_prompt(self, value: Any, param: str) -> None:
        fields.array(value, param)

    def prefix_texts(self, body: dict[str, Any]) -> Iterator[str]:
        messages = body.get(self.prompt_field)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                yield f"{_text_of(message.get('role'))}\0{_text_of(message.get('content'))}\0"

    def read_prompt(self, value: Any, answers: int) -> dict[str, Any]:
        return {"messages": read_messages(value, self.prompt_field)}

    def body(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        body = super().body(head, choices, usage)
        # All choices have the same prompt
        if choices and (prompt := choices[0].prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(prompt)
        if choices and (token_ids := choices[0].prompt_token_ids) is not None:
            self.add_prompt_ids(body, token_ids)
        return body

    def choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs, choice.tokens_as_ids)
        body = {"index": choice.index, "message": message_of(choice), "logprobs": logprobs}
        if choice.token_ids is not None:
            body["token_ids"] = choice.token_ids
        return body

    def add_prompt_ids(self, chunk: dict[str, Any], token_ids: list[int]) -> None:
        chunk["prompt_token_ids"] = token_ids

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(
        self,
        text: str | None,
        positions: Sequence[PositionLogprobs],
        offsets: TextOffsets | None = None,
        as_ids: bool = False,
    ) -> dict[str, Any]:
        return {
            "delta": {} if text is None else {"content": text},
            "logprobs": chat_logprobs(positions, as_ids) if positions else None,
        }

    def deltas(
        self, chunk: TokenChunk, positions: Sequence[PositionLogprobs], offsets: TextOffsets, as_ids: bool
    ) -> list[dict[str, Any]]:
        if chunk.parsed is None:
            return super().deltas(chunk, positions, offsets, as_ids)
        found = [{"delta": delta, "logprobs": None} for delta in deltas_of(chunk.parsed)]
        if positions:  # all with the first delta, like the tokens
            first = self.delta(None, positions, offsets, as_ids)
            found[:1] = [first | {"delta": found[0]["delta"]}] if found else [first]
        return found

    def ending(self, end: ChoiceEnd | None) -> dict[str, Any]:
        return {"finish_reason": None} if end is None else end._asdict()


def _text_of(content: Any) -> str:
    """Return the text of a message; deeply nested content is not read."""
    if isinstance(content, list):
        return "\0".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""
