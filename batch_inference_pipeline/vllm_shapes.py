"""Counterparts of vLLM's `SamplingParams` and of the outputs of its `LLM`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batch_inference_pipeline.results import RequestResult
from batch_inference_pipeline.vocabulary import CHAT, COMPLETIONS, PARAMETERS, PROMPT_FIELDS

_USUAL_TOKENS = 16  # vLLM's default, also of chats


class GenerationParameters:
    """The parameters of a call, by vLLM's names; `docs/requests.md` lists them."""

    def __init__(self, **values: Any) -> None:
        """Set parameters. Raise TypeError for an unknown name."""
        unknown = sorted(values.keys() - set(PARAMETERS))
        if unknown:
            raise TypeError(f"'{unknown[0]}' is no parameter: docs/requests.md lists all parameters")
        self.values = {"max_tokens": _USUAL_TOKENS, **values}

    def body(self, endpoint: str) -> dict[str, Any]:
        """Return the parameters as members of a body."""
        body = {name: value for name, value in self.values.items() if value is not None}
        likeliest = body.get("logprobs")
        if endpoint == CHAT and likeliest is not None and not isinstance(likeliest, bool):
            body |= {"logprobs": True, "top_logprobs": likeliest}
        return body

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


SamplingParams = GenerationParameters
"""vLLM's name of the class."""

ParametersOfEach = GenerationParameters | Sequence[GenerationParameters] | None


@dataclass(frozen=True)
class GeneratedChoice:
    """vLLM's `CompletionOutput`. `token_ids` are set with `return_token_ids`."""

    index: int
    text: str
    token_ids: list[int] | None
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True)
class GeneratedOutput:
    """vLLM's `RequestOutput`. `prompt` is None for token ids and for a conversation."""

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
    """Return texts or lists of token ids from prompts in the forms that vLLM accepts."""
    if isinstance(prompts, str | dict) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    return [one.get("prompt_token_ids") or one["prompt"] if isinstance(one, dict) else one for one in prompts]


def as_conversations(messages: Any) -> list[Any]:
    """Return a list of conversations; a single conversation becomes a list of one."""
    listed = list(messages)
    return [listed] if listed and isinstance(listed[0], dict) else listed


def bodies_of(endpoint: str, prompts: list[Any], parameters: ParametersOfEach) -> list[dict[str, Any]]:
    """Return bodies with the shared parameters, or each with its own.

    Raise ValueError if there are not as many parameters as prompts.
    """
    field = PROMPT_FIELDS[endpoint]
    if parameters is None or isinstance(parameters, GenerationParameters):
        usual = parameters or GenerationParameters()
        shared = usual.body(endpoint) if endpoint in (CHAT, COMPLETIONS) else {}
        return [{field: prompt, **shared} for prompt in prompts]
    if len(parameters) != len(prompts):
        raise ValueError(
            f"there are {len(parameters)} sampling_params for {len(prompts)} prompts; give one, or one for each prompt"
        )
    return [{field: prompt, **one.body(endpoint)} for prompt, one in zip(prompts, parameters, strict=True)]


def generated(bodies: list[dict[str, Any]], results: list[RequestResult]) -> list[GeneratedOutput]:
    """Return vLLM's outputs for results, in the order of the bodies."""
    return [_generated(body, result) for body, result in zip(bodies, results, strict=True)]


def embedded(bodies: list[dict[str, Any]], results: list[RequestResult]) -> list[EmbeddedOutput]:
    """Return vLLM's outputs for embeddings, in the order of the bodies."""
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
