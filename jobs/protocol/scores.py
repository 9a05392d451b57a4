"""`/v1/score`, in vLLM's shapes, and `/v1/rerank`, in those of Jina and Cohere."""

from collections.abc import Sequence
from typing import Any

from jobs.protocol import fields
from jobs.protocol.pooling_endpoint import MOST_INPUTS, PooledOutput, PoolingCall, PoolingEndpoint, PoolingHead
from jobs.protocol.pooling_parameters import RERANK, SCORE
from jobs.protocol.text_or_tokens import SOME_TEXT
from jobs.protocol.value_types import Schema

_NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
_TEXTS: Schema = {"anyOf": [SOME_TEXT, {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": SOME_TEXT}]}
_DOCUMENT: Schema = {"anyOf": [SOME_TEXT, {"type": "object", "required": ["text"], "properties": {"text": SOME_TEXT}}]}
_DOCUMENTS: Schema = {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": _DOCUMENT}


class ScoreEndpoint(PoolingEndpoint):
    """Pairs of texts in, a number for each out: from a cross-encoder, or the cosine of
    embeddings.
    """

    url = SCORE
    aliases = ("/score",)
    tasks = ("score", "embed")
    prompt_field = "queries"
    number_column = "score"
    id_prefix = "score-"

    @property
    def text_names(self) -> tuple[tuple[str, ...], ...]:
        return _NAMES

    def read_texts(self, body: dict[str, Any]) -> dict[str, Any]:
        names = _names_in(body)
        queries, documents = (_texts(fields.required(body, name), name) for name in names)
        if len(queries) not in (1, len(documents)):
            fields.fail(
                f"Invalid '{names[0]}': expected one text, or as many as '{names[1]}' has, {len(documents)}, but got"
                f" {len(queries)} instead.",
                names[0],
                "invalid_value",
            )
        return {"queries": queries, "documents": documents, "fields": names}

    def check_body(self, body: dict[str, Any], prefix: str) -> None:
        for name in _names_in(body):
            if not isinstance(value := fields.required(body, name, prefix), str | list):
                fields.wrong_type(value, "a string or an array of strings", f"{prefix}{name}")

    @property
    def texts_schema(self) -> Schema:
        either = [{"required": list(names)} for names in _NAMES]
        names = dict.fromkeys(name for names in _NAMES for name in names)
        return {"required": ["model"], "anyOf": either, "properties": dict.fromkeys(names, _TEXTS)}

    def body(self, call: PoolingCall, head: PoolingHead, outputs: Sequence[PooledOutput]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": output.numbers()[0]} for i, output in enumerate(outputs)]
        named = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return {**named, "data": data, "usage": head.usage}


class RerankEndpoint(PoolingEndpoint):
    """A query and documents in, the documents by relevance out."""

    url = RERANK
    aliases = ("/rerank", "/v2/rerank")
    tasks = ("score", "embed")
    prompt_field = "query"
    id_prefix = "rerank-"

    @property
    def text_names(self) -> tuple[tuple[str, ...], ...]:
        return (("query", "documents"),)

    def read_texts(self, body: dict[str, Any]) -> dict[str, Any]:
        query = fields.text(fields.required(body, "query"), "query", least=1)
        documents = fields.array(fields.required(body, "documents"), "documents", MOST_INPUTS, least=1)
        texts = [_document(document, f"documents[{i}]") for i, document in enumerate(documents)]
        return {"queries": [query], "documents": texts, "fields": ("query", "documents")}

    def check_body(self, body: dict[str, Any], prefix: str) -> None:
        fields.text(fields.required(body, "query", prefix), f"{prefix}query")
        fields.array(fields.required(body, "documents", prefix), f"{prefix}documents")

    @property
    def texts_schema(self) -> Schema:
        return {
            "required": ["model", "query", "documents"],
            "properties": {"query": SOME_TEXT, "documents": _DOCUMENTS},
        }

    def body(self, call: PoolingCall, head: PoolingHead, outputs: Sequence[PooledOutput]) -> dict[str, Any]:
        scores = [output.numbers()[0] for output in outputs]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: call.top_n or None]
        results = [
            {"index": i}
            | ({"document": {"text": call.documents[i]}} if call.return_documents else {})
            | {"relevance_score": scores[i]}
            for i in best
        ]
        return {"id": head.id, "model": head.model, "usage": head.usage, "results": results}


def _names_in(body: dict[str, Any]) -> tuple[str, str]:
    """Return the names of a body's pairs: the first two names that it has, else the usual ones."""
    return next((names for names in _NAMES if all(body.get(name) is not None for name in names)), _NAMES[0])


def _texts(value: Any, param: str) -> list[str]:
    if isinstance(value, str):
        return [fields.text(value, param, least=1)]
    if not isinstance(value, list):
        fields.wrong_type(value, "a string or an array of strings", param)
    items = fields.array(value, param, MOST_INPUTS, least=1)
    return [fields.text(item, f"{param}[{i}]", least=1) for i, item in enumerate(items)]


def _document(value: Any, param: str) -> str:
    if isinstance(value, dict):
        return fields.text(fields.required(value, "text", f"{param}."), f"{param}.text", least=1)
    return fields.text(value, param, least=1)
