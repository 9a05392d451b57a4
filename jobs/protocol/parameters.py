"""The parameters of a call, each declared once, as a field of `Parameters` or a row of
`UNSUPPORTED`.

The declarations define how a body is read, its JSON Schema, the columns of a Parquet file, the
table of `docs/requests.md`, and the copy into the engine's `SamplingParams`, whose fields have the
same names.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from jobs.protocol import fields
from jobs.protocol.declared import DeclaredParameter, ParameterTypes, declared_on
from jobs.protocol.format_parameters import FORMATS, WHITESPACE
from jobs.protocol.output_format import FormatText, OutputFormat
from jobs.protocol.service_tier import SERVICE_TIERS
from jobs.protocol.template_variables import EFFORTS, TemplateVariables
from jobs.protocol.tools import ToolChoices, Tools
from jobs.protocol.value_types import (
    BiasByToken,
    Boolean,
    Budget,
    Integer,
    Number,
    OneOf,
    Schema,
    StreamDetails,
    StreamOptions,
    Strings,
    TokenIds,
    TopK,
    Truncation,
    Unsupported,
    ValueType,
    must_be,
)

_ANSWERS = Integer(1, 128)
_LIKELIEST = Integer(0, 20)
_INT64 = 2**63 - 1


def _for_chats(*neutral: Any) -> Unsupported:
    """Return the type that a chat's parameter has in completions."""
    return Unsupported(neutral, "is for chats.")


@dataclass(frozen=True)
class Parameter:
    """The type of a parameter (in chats `in_chats`, if set) and its description."""

    values: ValueType
    does: str
    in_chats: ValueType | None = None
    default: str = ""  # for a table, if the field's own default does not tell
    for_streams: bool = False  # not allowed in a line of a file

    def values_of(self, chat: bool) -> ValueType:
        """Return the parameter's type in chats or in completions."""
        return self.in_chats if chat and self.in_chats is not None else self.values


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """A call's parameters, except its prompt and its model."""

    n: Annotated[int, Parameter(_ANSWERS, "answers to each prompt")] = 1
    best_of: Annotated[
        int,
        Parameter(_ANSWERS, "generate that many, return the `n` of the highest mean log probability", default="`n`"),
    ] = 1
    max_tokens: Annotated[
        int | None,
        Parameter(
            Integer(0),
            "tokens to generate at most; 0 scores the prompt",
            Integer(1),
            "16; in chats the rest of the context",
        ),
    ] = None
    max_completion_tokens: Annotated[int | None, Parameter(Integer(0), "the same, and goes before it", Integer(1))] = (
        None
    )
    min_tokens: Annotated[
        int, Parameter(Integer(0), "no end before that many tokens, not even by stop strings; at most `max_tokens`")
    ] = 0
    temperature: Annotated[float, Parameter(Number(0, 2), "0 takes the most likely token")] = 1.0
    top_p: Annotated[
        float, Parameter(Number(0, 1), "keeps the fewest tokens that make up this probability, at least one")
    ] = 1.0
    top_k: Annotated[int, Parameter(TopK(), "keeps that many of the most likely tokens; 0 or -1: all")] = 0
    min_p: Annotated[
        float, Parameter(Number(0, 1), "keeps tokens with at least this share of the highest probability")
    ] = 0.0
    presence_penalty: Annotated[float, Parameter(Number(-2, 2), "over the output")] = 0.0
    frequency_penalty: Annotated[float, Parameter(Number(-2, 2), "over the output, by count")] = 0.0
    repetition_penalty: Annotated[float, Parameter(Number(0.01, 100), "over prompt and output")] = 1.0
    logit_bias: Annotated[dict[int, float], Parameter(BiasByToken(1024, Number(-100, 100)), "added to the logits")] = {}
    seed: Annotated[
        int | None,
        Parameter(
            Integer(-_INT64 - 1, _INT64),
            "the noise is a function of seed, choice, position and token alone",
            default="one that is stored with the request",
        ),
    ] = None
    stop: Annotated[
        list[str], Parameter(Strings(16, 1000, or_one=True), "where the text ends; `stop_reason` names the one found")
    ] = []
    stop_token_ids: Annotated[
        tuple[int, ...], Parameter(TokenIds(1024), "tokens that end it; `stop_reason` is the id")
    ] = ()
    allowed_token_ids: Annotated[
        tuple[int, ...], Parameter(TokenIds(1024, least=1), "no other token is generated")
    ] = ()
    bad_words: Annotated[
        list[str],
        Parameter(Strings(256, 100), "never generated, with a space before them or without"),
    ] = []
    include_stop_str_in_output: Annotated[
        bool, Parameter(Boolean(), "the text ends with the stop string; with a stop token too, unless it is special")
    ] = False
    ignore_eos: Annotated[bool, Parameter(Boolean(), "continue after the model's own end")] = False
    skip_special_tokens: Annotated[bool, Parameter(Boolean(), "false: special tokens appear in the text")] = True
    logprobs: Annotated[
        int | None,
        Parameter(
            _LIKELIEST, "natural logarithms of that many of the most likely tokens too; in chats true", Boolean()
        ),
    ] = None
    top_logprobs: Annotated[
        int,
        Parameter(
            Unsupported((0,), "is for chats; in a completion 'logprobs' is the number.", _LIKELIEST),
            "how many of the most likely tokens, with `logprobs`",
            _LIKELIEST,
        ),
    ] = 0
    prompt_logprobs: Annotated[int | None, Parameter(_LIKELIEST, "the same for the prompt's tokens")] = None
    echo: Annotated[
        bool,
        Parameter(
            Boolean(),
            "the answer begins with the prompt",
            Unsupported((False,), "is for completions: a chat's answer cannot begin with its prompt.", Boolean()),
        ),
    ] = False
    add_special_tokens: Annotated[
        bool | None,
        Parameter(Boolean(), "a text gets the tokens that the model expects around it", default="true; in chats false"),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Parameter(Truncation(), "keep only that many of the prompt's last tokens; -1: as many as the model can take"),
    ] = None
    priority: Annotated[
        int,
        Parameter(
            Integer(-fields.INT32 - 1),
            "lower runs first, among the live calls of a tenant and among batch lines; vLLM's meaning",
        ),
    ] = 0
    service_tier: Annotated[
        str | None,
        Parameter(
            OneOf(SERVICE_TIERS), "flex: `priority` 100, priority: -100, others: 0; the answer repeats what it came to"
        ),
    ] = None
    # The next eight set `Call.output_format`, and are not set in a call.
    response_format: Annotated[
        OutputFormat | None,
        Parameter(FORMATS["response_format"], "the form of the answer; a schema is kept to, `strict` or not"),
    ] = None
    structured_outputs: Annotated[
        OutputFormat | None,
        Parameter(FORMATS["structured_outputs"], "the same, with `whitespace_pattern` and `disable_any_whitespace`"),
    ] = None
    structural_tag: Annotated[
        OutputFormat | None, Parameter(FORMATS["structural_tag"], "as in `structured_outputs`")
    ] = None
    guided_json: Annotated[OutputFormat | None, Parameter(FORMATS["guided_json"], "the answer's schema")] = None
    guided_regex: Annotated[OutputFormat | None, Parameter(FORMATS["guided_regex"], "what the answer matches")] = None
    guided_choice: Annotated[OutputFormat | None, Parameter(FORMATS["guided_choice"], "the answer is one of them")] = (
        None
    )
    guided_grammar: Annotated[OutputFormat | None, Parameter(FORMATS["guided_grammar"], "what the answer follows")] = (
        None
    )
    guided_whitespace_pattern: Annotated[
        str | None, Parameter(WHITESPACE, "what may be between the tokens of JSON: a regular expression")
    ] = None
    tools: Annotated[
        list[dict[str, Any]], Parameter(Unsupported(why="is for chats."), "what the answer may call", Tools())
    ] = []
    tool_choice: Annotated[
        str,
        Parameter(_for_chats("none", "auto"), "whether it calls a tool, and which", ToolChoices(), "auto with `tools`"),
    ] = "none"
    parallel_tool_calls: Annotated[bool, Parameter(Boolean(), "the answer may call several tools")] = True
    chat_template_kwargs: Annotated[
        dict[str, Any], Parameter(_for_chats({}), "variables of the chat template", TemplateVariables())
    ] = {}
    reasoning_effort: Annotated[
        str | None,
        Parameter(_for_chats(), "a variable of the chat template; none: `enable_thinking` is false", OneOf(EFFORTS)),
    ] = None
    include_reasoning: Annotated[
        bool, Parameter(_for_chats(True), "false: the answer leaves its reasoning out", Boolean())
    ] = True
    thinking_token_budget: Annotated[
        int | None,
        Parameter(_for_chats(), "tokens of reasoning at most; -1: as many as the answer may have", Budget()),
    ] = None
    add_generation_prompt: Annotated[
        bool, Parameter(_for_chats(True), "the prompt ends where an answer begins", Boolean())
    ] = True
    continue_final_message: Annotated[
        bool, Parameter(_for_chats(False), "go on with the last message, which is the assistant's", Boolean())
    ] = False
    return_token_ids: Annotated[
        bool, Parameter(Boolean(), "`prompt_token_ids`, and `token_ids` of each choice, in the answer")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Parameter(Boolean(), 'the tokens of log probabilities are written as "token_id:5"')
    ] = False
    stream: Annotated[bool, Parameter(Boolean(), "answer with events, of a live call only", for_streams=True)] = False
    stream_options: Annotated[
        StreamDetails,
        Parameter(
            StreamOptions(),
            "end a stream with a chunk that contains the usage; continuous: also give it so far with each chunk",
            for_streams=True,
        ),
    ] = StreamDetails()


_NOT_YET = Unsupported()
UNSUPPORTED: dict[str, ValueType] = {
    "chat_template": Unsupported(
        (),
        "is code and cannot come with a request: the model's own is used, or that of the worker's --chat-template.",
    ),
    "logits_processors": _NOT_YET,
    "functions": _NOT_YET,
    "function_call": Unsupported(("none", "auto")),
    "suffix": _NOT_YET,
    "audio": _NOT_YET,
    "modalities": must_be(["text"]),
    "prediction": _NOT_YET,
    "web_search_options": _NOT_YET,
    "documents": _NOT_YET,
    "prompt_embeds": _NOT_YET,
    "cache_salt": _NOT_YET,
    "vllm_xargs": _NOT_YET,
    "mm_processor_kwargs": _NOT_YET,
    "truncation_side": must_be("left"),
    "reasoning": _NOT_YET,
    "thinking": _NOT_YET,
    "verbosity": must_be("medium"),
    "repetition_detection": _NOT_YET,
    "logprob_token_ids": _NOT_YET,
    "detokenize": must_be(True),
    "spaces_between_special_tokens": must_be(True),
    "use_beam_search": _NOT_YET,
    "length_penalty": must_be(1.0),
}
"""Parameters of OpenAI or vLLM that are not supported here; unknown ones are ignored."""

IGNORED = (
    *("user", "safety_identifier", "metadata", "store", "moderation"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("request_id", "guided_decoding_backend", "kv_transfer_params", "media_io_kwargs"),
)
"""Members of bodies that clients of OpenAI's or vLLM's API send, and that change no answer."""


def rows() -> list[DeclaredParameter[Parameter]]:
    """Return the declared parameters in their order."""
    return declared_on(Parameters, Parameter)


_ROWS = rows()
FILE_COLUMNS = tuple(row.name for row in _ROWS if not row.parameter.for_streams)
"""Parameters that a line of a file can have."""
TOKEN_ID_LISTS = tuple(row.name for row in _ROWS if isinstance(row.parameter.values, TokenIds))
"""Parameters that hold token ids; a model may lack them."""
JSON_COLUMNS = (
    *(name for name, kind in FORMATS.items() if not isinstance(kind, FormatText)),
    *("tools", "tool_choice", "chat_template_kwargs", "logit_bias"),
)
"""Parameters that are objects; a column of a file may hold them as their text."""

_TYPES = {
    chat: ParameterTypes(UNSUPPORTED, {row.name: row.parameter.values_of(chat) for row in _ROWS})
    for chat in (True, False)
}


def read_parameters(body: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Return the values of `Parameters` that a body sets, each read independently.

    Raise `ApiError` 400 for a bad value and for an unsupported one.
    """
    return _TYPES[chat].read(body)


def parameter_names(chat: bool) -> frozenset[str]:
    """Return the names of the parameters, also of those that cannot be honored."""
    return _TYPES[chat].names


def schemas(chat: bool) -> dict[str, Schema]:
    """Return the JSON Schema of each parameter, in the form that `read_parameters` accepts."""
    return _TYPES[chat].schemas()
