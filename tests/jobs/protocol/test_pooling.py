"""Calls for numbers: how they are read, that the schema says the same, and what is answered."""

import base64
import itertools
import json
import struct
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from jobs.protocol.endpoints import POOLING_ENDPOINTS, check_answers, urls_for
from jobs.protocol.lines import Line
from jobs.protocol.pooling_endpoint import MOST_INPUTS, PoolingCall, PoolingHead
from jobs.protocol.pooling_parameters import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE
from jobs.protocol.results import ApiError, encode_json
from jobs.protocol.validation import LineError, body_schema, check_batch_line, check_line

INPUTS: list[Any] = [None, "x", "", ["x", "y"], ["x", ""], [], [1, 2], [[1], [2, 3]], [[]], ["x", [1]], [-1], [True], 5]
OPTIONS: dict[str, list[Any]] = {
    "dimensions": [None, 3, 0],
    "encoding_format": [None, "base64", "hex"],
    "embed_dtype": [None, "float16", "bfloat16"],
    "truncate_prompt_tokens": [None, -1, 0],
    "normalize": [None, True],
    "padding": [None, "do_not_pad", "max_length"],
}
TEXTS: list[Any] = [None, "x", "", ["x", "y"], ["x", "y", "z"], [], [1]]
HEAD = PoolingHead("id", "m", 1, 9, ["no", "yes"])


class GivenVector:
    """What a model gave."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def numbers(self) -> list[float]:
        return self._numbers

    def encoded(self, encoding_format: str) -> msgspec.Raw | str:
        packed = struct.pack(f"<{len(self._numbers)}f", *self._numbers)
        return base64.b64encode(packed).decode() if encoding_format == "base64" else msgspec.Raw(b"[0.5]")


def read(url: str, **body: Any) -> PoolingCall:
    return POOLING_ENDPOINTS[url].read({"model": "m", **body})


def refused(url: str, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(url, **body)
    assert caught.value.status == 400
    return caught.value


def agrees(url: str, values: dict[str, list[Any]]) -> int:
    """How many bodies of these values are taken, each by reader and schema alike."""
    validator, taken = Draft202012Validator(body_schema(url)), 0
    for given in itertools.product(*values.values()):
        body = {"model": "m", **dict(zip(values, given, strict=True))}
        try:
            POOLING_ENDPOINTS[url].read(body)
            found = True
        except ApiError:
            found = False
        assert found == validator.is_valid(body), body
        taken += found
    return taken


@pytest.mark.parametrize("url", [EMBEDDINGS, CLASSIFY, POOLING])
def test_a_body_of_texts_is_taken_where_the_schema_takes_it(url: str) -> None:
    assert agrees(url, {"input": INPUTS, **OPTIONS}) > 20


def test_pairs_are_taken_where_the_schema_takes_them() -> None:
    assert agrees(RERANK, {"query": [None, "x", "", 5], "documents": [*TEXTS[3:], [{"text": "x"}], [{}]]}) == 3
    one = [text for text in TEXTS if not isinstance(text, list) or len(text) < 3]
    assert agrees(SCORE, {"queries": [None, "x", ""], "documents": one}) == 2
    assert agrees(SCORE, {"text_1": ["x", ["x"]], "text_2": TEXTS}) == 6


def test_pairs_have_one_query_or_as_many_as_documents() -> None:
    assert read(SCORE, queries="q", documents=["a", "b"]).pairs == [("q", "a"), ("q", "b")]
    assert read(SCORE, text_1=["q", "r"], text_2=["a", "b"]).pairs == [("q", "a"), ("r", "b")]
    assert read(SCORE, queries=["q"], items="a").pairs == [("q", "a")]
    assert read(RERANK, query="q", documents=["a", {"text": "b"}]).documents == ["a", "b"]
    error = refused(SCORE, data_1=["q", "r"], data_2=["a", "b", "c"])
    assert (error.param, error.message) == (
        "data_1",
        "Invalid 'data_1': expected one text, or as many as 'data_2' has, 3, but got 2 instead.",
    )


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "empty_string"),
        ({"input": ["x", ""]}, "input[1]", "empty_string"),
        ({"input": []}, "input", "empty_array"),
        ({"input": ["x"] * (MOST_INPUTS + 1)}, "input", "array_above_max_length"),
        ({"input": [[1], "x"]}, "input[1]", "invalid_type"),
        ({"input": {"text": "x"}}, "input", "invalid_type"),
        ({}, "input", "missing_required_parameter"),
        ({"input": "x", "dimensions": 0}, "dimensions", "integer_below_min_value"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "x", "embed_dtype": "bfloat16"}, "embed_dtype", "invalid_value"),
        ({"input": "x", "normalize": False}, "normalize", "unsupported_value"),
    ],
)
def test_bad_input_is_named(body: dict[str, Any], param: str, code: str) -> None:
    error = refused(EMBEDDINGS, **body)
    assert (error.param, error.code) == (param, code)


def test_a_long_text_of_token_ids_is_no_list_of_many() -> None:
    assert read(EMBEDDINGS, input=[1] * (MOST_INPUTS + 1)).inputs == [[1] * (MOST_INPUTS + 1)]


def test_a_model_that_cannot_do_it_says_what_it_can() -> None:
    assert urls_for(["embed"]) == [EMBEDDINGS, SCORE, RERANK, POOLING]
    assert urls_for(["score"]) == [SCORE, RERANK, CLASSIFY, POOLING]
    check_answers("m", ["embed", "tokenize"], EMBEDDINGS)
    with pytest.raises(ApiError) as caught:
        check_answers("chat", ["generate"], EMBEDDINGS)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_endpoint")
    assert caught.value.message == (
        "The model `chat` cannot be used with /v1/embeddings. It answers: /v1/chat/completions, /v1/completions."
    )


def test_a_line_is_checked_with_its_models_tasks() -> None:
    body = {"model": "m", "input": "x"}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": EMBEDDINGS, "body": body}).encode()
    assert isinstance(check_line(line, 1, models={"m": None}), Line)
    assert isinstance(check_batch_line(line, 1, EMBEDDINGS, {"m": ("embed",)}), Line)
    found = check_batch_line(line, 1, EMBEDDINGS, {"m": ("generate",)})
    assert isinstance(found, LineError)
    assert (found.code, found.param) == ("unsupported_endpoint", "body.model")
    found = check_batch_line(line.replace(b'"x"', b"5"), 1, EMBEDDINGS, {"m": None})
    assert isinstance(found, LineError)
    assert (found.code, found.param) == ("invalid_request", "body.input")


def test_embeddings_have_openais_shape() -> None:
    call = read(EMBEDDINGS, input=["x", "y"])
    body = json.loads(encode_json(call.endpoint.body(call, HEAD, [GivenVector(1), GivenVector(2)])))
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": [0.5]} for i in (0, 1)],
        "model": "m",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    call = read(EMBEDDINGS, input="x", encoding_format="base64")
    assert call.endpoint.body(call, HEAD, [GivenVector(1.5)])["data"][0]["embedding"] == "AADAPw=="


@pytest.mark.parametrize("url", [EMBEDDINGS, POOLING])
def test_an_answer_says_its_type_unless_that_is_float32(url: str) -> None:
    for asked, said in ((None, None), ("float32", None), ("float16", "float16")):
        call = read(url, input="x", embed_dtype=asked)
        assert call.endpoint.body(call, HEAD, [GivenVector(0.5)]).get("embed_dtype") == said


def test_documents_come_by_their_relevance() -> None:
    given = [GivenVector(0.25), GivenVector(0.75), GivenVector(0.5)]
    call = read(RERANK, query="q", documents=["a", "b", "c"], top_n=2)
    assert call.endpoint.body(call, HEAD, given) == {
        "id": "id",
        "model": "m",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "results": [
            {"index": 1, "document": {"text": "b"}, "relevance_score": 0.75},
            {"index": 2, "document": {"text": "c"}, "relevance_score": 0.5},
        ],
    }
    call = read(RERANK, query="q", documents=["a", "b", "c"], return_documents=False)
    assert call.endpoint.body(call, HEAD, given)["results"][2] == {"index": 0, "relevance_score": 0.25}
    call = read(SCORE, queries="q", documents=["a", "b", "c"])
    assert [item["score"] for item in call.endpoint.body(call, HEAD, given)["data"]] == [0.25, 0.75, 0.5]


def test_a_class_has_its_label() -> None:
    call = read(CLASSIFY, input=["x", "y", "z"])
    data = call.endpoint.body(call, HEAD, [GivenVector(0.1, 0.9), GivenVector(1, 0), GivenVector(0, 0, 1)])["data"]
    assert [(item["label"], item["num_classes"]) for item in data] == [("yes", 2), ("no", 2), (None, 3)]
    assert data[0]["probs"] == [0.1, 0.9]
