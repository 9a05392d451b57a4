"""The call shapes of vLLM's `LLM`: its `SamplingParams`, and the attributes of its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batch_inference_pipeline.results import RequestResult
from batch_inference_pipeline.vocabulary import CHAT, COMPLETIONS, PARAMETERS, PROMPT_FIELDS

_USUAL_TOKENS = 16  # vLLM's default, also of chats


class GenerationParameters:
    """The parameters of a call by their names, which are vLLM's; `docs/requests.md` lists them."""

    def __init__(self, **values: Any) -> None:
        """Raise TypeError for a name that is no parameter."""
        unknown = sorted(values.keys() - set(PARAMETERS))
        if unknown:
            raise TypeError(f"'{unknown[0]}' is no parameter; docs/requests.md lists those that there are")
        self.values = {"max_tokens": _USUAL_TOKENS, **values}

    def body(self, endpoint: str) -> dict[str, Any]:
        """Return what a body says of them."""
        body = {name: value for name, value in self.values.items() if value is not None}
        likeliest = body.get("logprobs")
        if endpoint == CHAT and likeliest is not None and not isinstance(likeliest, bool):
            body |= {"logprobs": True, "top_logprobs": likeliest}
        return body

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


SamplingParams = GenerationParameters
"""The name that vLLM gives it."""

ParametersOfEach = GenerationParameters | Sequence[GenerationParameters] | None


@dataclass(frozen=True)
class GeneratedChoice:
    """vLLM's `CompletionOutput`. `token_ids` are there with `return_token_ids`."""

    index: int
    text: str
    token_ids: list[int] | None
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class GeneratedOutput:
    """vLLM's `RequestOutput`. `prompt` is None for one of token ids and for a conversation."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[GeneratedChoice]
    finished: bool = True


@dataclass(frozen=True)
class EmbeddedText:
    """vLLM's `EmbeddingOutput`."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddedOutput:
    """vLLM's `EmbeddingRequestOutput`."""

    request_id: str
    prompt: str | None
    outputs: EmbeddedText
    finished: bool = True


def as_prompts(prompts: Any) -> list[Any]:
    """Return texts or lists of token ids of what vLLM takes for prompts."""
    if isinstance(prompts, str | dict) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    return [one.get("prompt_token_ids") or one["prompt"] if isinstance(one, dict) else one for one in prompts]


def as_conversations(messages: Any) -> list[Any]:
    """Return conversations, of which one may be given alone."""
    listed = list(messages)
    return [listed] if listed and isinstance(listed[0], dict) else listed


def bodies_of(endpoint: str, prompts: list[Any], parameters: ParametersOfEach) -> list[dict[str, Any]]:
    """Return bodies with the parameters of all, or of each. Raise ValueError for another number."""
    field = PROMPT_FIELDS[endpoint]
    if parameters is None or isinstance(parameters, GenerationParameters):
        usual = parameters or GenerationParameters()
        shared = usual.body(endpoint) if endpoint in (CHAT, COMPLETIONS) else {}
        return [{field: prompt, **shared} for prompt in prompts]
    if len(parameters) != len(prompts):
        raise ValueError(
            f"there are {len(parameters)} sampling_params for {len(prompts)} prompts; give one, or as many"
        )
    return [{field: prompt, **one.body(endpoint)} for prompt, one in zip(prompts, parameters, strict=True)]


def generated(bodies: list[dict[str, Any]], results: list[RequestResult]) -> list[GeneratedOutput]:
    """Return the outputs of answers in the order of their bodies."""
    return [_generated(body, result) for body, result in zip(bodies, results, strict=True)]


def embedded(bodies: list[dict[str, Any]], results: list[RequestResult]) -> list[EmbeddedOutput]:
    """Return the outputs of embeddings in the order of their bodies."""
    return [
        EmbeddedOutput(result.custom_id, _text(body["input"]), EmbeddedText(result.embedding))
        for body, result in zip(bodies, results, strict=True)
    ]


def _generated(body: dict[str, Any], result: RequestResult) -> GeneratedOutput:
    answer = result.body
    choices = answer["choices"]
    ids = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
    outputs = [
        GeneratedChoice(
            choice["index"],
            str((choice["message"]["content"] if "message" in choice else choice["text"]) or ""),
            choice.get("token_ids"),
            choice.get("logprobs"),
            choice["finish_reason"],
            choice.get("stop_reason"),
        )
        for choice in choices
    ]
    return GeneratedOutput(result.custom_id, _text(body.get("prompt")), ids, outputs)


def _text(prompt: Any) -> str | None:
    return prompt if isinstance(prompt, str) else None
