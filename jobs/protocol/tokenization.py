"""`/tokenize` and `/detokenize`, in vLLM's shapes: the tokens of a prompt, without an answer."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from jobs.protocol import fields
from jobs.protocol.endpoint import Endpoint
from jobs.protocol.parameters import UNSUPPORTED
from jobs.protocol.prompts import MESSAGES, check_continued, read_messages, settle_final_message
from jobs.protocol.template_variables import TemplateVariables
from jobs.protocol.tools import Tools
from jobs.protocol.value_types import Boolean, Schema, Text, TokenIds, Unsupported, ValueType, or_null

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MOST_BYTES = 4 * 2**20
"""Most characters of a text to tokenize, or most tokens."""

_PROMPT = Text(MOST_BYTES)
_TOKENS = TokenIds(MOST_BYTES)
_NAMED: Schema = {"model": {"type": ["string", "null"], "minLength": 1}}
_OPTIONS: dict[str, ValueType] = {
    "add_special_tokens": Boolean(),
    "return_token_strs": Boolean(),
    "add_generation_prompt": Boolean(),
    "continue_final_message": Boolean(),
    "chat_template_kwargs": TemplateVariables(),
    "tools": Tools(),
    **{name: UNSUPPORTED[name] for name in ("chat_template", "mm_processor_kwargs")},
    "media_io_kwargs": Unsupported(),
}


class TokenizerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A valid call that needs only the tokenizer."""

    endpoint: "TokenizerEndpoint"
    model: str
    stream: ClassVar[bool] = False


class TokenizeCall(TokenizerCall, frozen=True, kw_only=True):
    """Either `prompt` or `messages` is set."""

    prompt: str = ""
    messages: Sequence[dict[str, Any]] = ()
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeCall(TokenizerCall, frozen=True, kw_only=True):
    """A call for the text of some tokens."""

    tokens: Sequence[int]


class TokenizerEndpoint(Endpoint):
    """An endpoint that needs the tokenizer but no engine; not for lines of a batch."""

    tasks = ("tokenize",)

    def read(self, body: Any, default_model: str | None) -> TokenizerCall:
        """Read the body of a call; without `model` the default one is used.

        Raise `ApiError` 400 for a bad value, naming it; unknown parameters are ignored.
        """
        body = fields.mapping(body, "body")
        model = fields.optional(body, "model", lambda value, param: fields.text(value, param, least=1), default_model)
        if model is None:
            fields.missing("model")
        return self._read(body, model)

    @abstractmethod
    def _read(self, body: dict[str, Any], model: str) -> TokenizerCall: ...


class TokenizeEndpoint(TokenizerEndpoint):
    """A text or messages in, token ids out."""

    url = TOKENIZE

    @property
    def body_schema(self) -> Schema:
        options = {name: or_null(kind.schema) for name, kind in _OPTIONS.items()}
        null: Schema = {"type": "null"}
        prompt = {"required": ["prompt"], "properties": {"prompt": _PROMPT.schema, "messages": null}}
        chat = {"required": ["messages"], "properties": {"messages": MESSAGES, "prompt": null}}
        return {"type": "object", "properties": {**_NAMED, **options}, "anyOf": [prompt, chat]}

    def _read(self, body: dict[str, Any], model: str) -> TokenizeCall:
        values = {name: kind.read(body[name], name) for name, kind in _OPTIONS.items() if body.get(name) is not None}
        options = {name: value for name, value in values.items() if name in TokenizeCall.__struct_fields__}
        if body.get("messages") is None:
            prompt = _PROMPT.read(fields.required(body, "prompt"), "prompt")
            return TokenizeCall(endpoint=self, model=model, prompt=prompt, **options)
        if body.get("prompt") is not None:
            fields.fail("Give either 'prompt' or 'messages', not both.", "prompt", "invalid_value")
        settle_final_message(options)
        messages = read_messages(body["messages"], "messages")
        call = TokenizeCall(endpoint=self, model=model, messages=messages, **{"add_special_tokens": False, **options})
        if call.continue_final_message:
            check_continued(messages)
        return call


class DetokenizeEndpoint(TokenizerEndpoint):
    """Token ids in, their text out."""

    url = DETOKENIZE

    @property
    def body_schema(self) -> Schema:
        return {"type": "object", "required": ["tokens"], "properties": {**_NAMED, "tokens": _TOKENS.schema}}

    def _read(self, body: dict[str, Any], model: str) -> DetokenizeCall:
        tokens = _TOKENS.read(fields.required(body, "tokens"), "tokens")
        return DetokenizeCall(endpoint=self, model=model, tokens=tokens)
