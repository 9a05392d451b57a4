"""`/v1/completions`, in OpenAI's shapes with vLLM's `stop_reason` and `prompt_logprobs`."""

from collections.abc import Iterator, Sequence
from typing import Any

from jobs.protocol import fields
from jobs.protocol.endpoint import TextEndpoint
from jobs.protocol.logprobs import TextOffsets, completion_logprobs, prompt_logprobs, text_offsets
from jobs.protocol.prompts import PROMPT, read_prompts
from jobs.protocol.results import Choice, PositionLogprobs
from jobs.protocol.value_types import Schema

COMPLETIONS = "/v1/completions"

_MOST_PREFIX_ITEMS = 8192


class CompletionsEndpoint(TextEndpoint):
    """Prompts in, continuations out."""

    url = COMPLETIONS
    is_chat = False
    usual_tokens = 16  # OpenAI's default
    prompt_field = "prompt"
    prompt_schema = PROMPT
    id_prefix = "cmpl-"
    body_object = "text_completion"
    chunk_object = "text_completion"

    @property
    def body_schema(self) -> Schema:
        given = {"required": ["prompt"], "properties": {"prompt": {"not": {"type": "null"}}}}
        return {"required": ["model"], "if": {"required": ["messages"]}, "then": given}

    def prompt_of(self, body: dict[str, Any], prefix: str = "") -> Any:
        """Return the prompt; None means the beginning of a text, unless the body has messages."""
        return super().prompt_of(body, prefix) if "messages" in body else body.get(self.prompt_field)

    def check_prompt(self, value: Any, param: str) -> None:
        if not isinstance(value, str | list | None):
            fields.wrong_type(value, "a string or an array", param)

    def prefix_texts(self, body: dict[str, Any]) -> Iterator[str]:
        prompt = body.get(self.prompt_field)
        if isinstance(prompt, str):
            yield prompt
        elif isinstance(prompt, list):
            yield "\0".join(str(item) for item in prompt[:_MOST_PREFIX_ITEMS] if isinstance(item, str | int))

    def read_prompt(self, value: Any, answers: int) -> dict[str, Any]:
        return {"prompts": read_prompts(value, self.prompt_field, answers)}

    def choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            offsets = text_offsets(choice.text, choice.logprobs)
            logprobs = completion_logprobs(choice.logprobs, offsets, choice.tokens_as_ids)
        body: dict[str, Any] = {"index": choice.index, "text": choice.text, "logprobs": logprobs}
        if choice.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs)
        if choice.token_ids is not None:
            body |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_token_ids}
        return body

    def add_prompt_ids(self, chunk: dict[str, Any], token_ids: list[int]) -> None:
        chunk["choices"][0]["prompt_token_ids"] = token_ids

    def delta(
        self,
        text: str | None,
        positions: Sequence[PositionLogprobs],
        offsets: TextOffsets | None = None,
        as_ids: bool = False,
    ) -> dict[str, Any]:
        logprobs = None
        if positions and offsets is not None:
            logprobs = completion_logprobs(positions, offsets.of(positions, text or ""), as_ids)
        return {"text": text or "", "logprobs": logprobs}
