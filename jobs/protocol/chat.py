"""`/v1/chat/completions`, in OpenAI's shapes with vLLM's `stop_reason` and `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Any

from jobs.protocol import fields
from jobs.protocol.endpoint import AnswerHead, ChoiceEnd, Endpoint
from jobs.protocol.logprobs import TextOffsets, chat_logprobs, prompt_logprobs
from jobs.protocol.prompts import MESSAGES, read_messages
from jobs.protocol.results import Choice, PositionLogprobs, Usage

CHAT = "/v1/chat/completions"


class ChatEndpoint(Endpoint):
    """Messages in, a message out."""

    url = CHAT
    is_chat = True
    prompt_field = "messages"
    prompt_schema = MESSAGES
    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def check_prompt(self, value: Any, param: str) -> None:
        fields.array(value, param)

    def read_prompt(self, value: Any, answers: int) -> dict[str, Any]:
        return {"messages": read_messages(value, self.prompt_field)}

    def body(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        body = super().body(head, choices, usage)
        # All choices have the same prompt
        if choices and (prompt := choices[0].prompt_logprobs) is not None:
            body["prompt_logprobs"] = prompt_logprobs(prompt)
        return body

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
        return {"index": choice.index, "message": message, "logprobs": logprobs}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(
        self, text: str | None, positions: Sequence[PositionLogprobs], offsets: TextOffsets | None = None
    ) -> dict[str, Any]:
        return {
            "delta": {} if text is None else {"content": text},
            "logprobs": chat_logprobs(positions) if positions else None,
        }

    def ending(self, end: ChoiceEnd | None) -> dict[str, Any]:
        return {"finish_reason": None} if end is None else end._asdict()
