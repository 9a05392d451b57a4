"""The JSON Schema of a body takes what the validator takes, and nothing else."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.parameters import FILE_COLUMNS, UNSUPPORTED, read_parameters, rows, schemas
from jobs.protocol.results import ApiError
from jobs.protocol.validation import body_schema, parse_call

SCHEMAS = {endpoint: body_schema(endpoint) for endpoint in (CHAT, COMPLETIONS)}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", None)
PART = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CONTENTS = ("x", "", None, 5, [], [PART], [PART, IMAGE], ["x"], [{"type": "text"}], {})
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL_CALLS = (
    None,
    [],
    [{}],
    [{"id": "a"}],
    ["x"],
    {},
    "x",
    [CALL],
    [CALL, CALL | {"type": "custom"}],
    [CALL | {"id": None}],
    [CALL | {"function": {"name": "", "arguments": ""}}],
    [CALL | {"function": {"name": "f", "arguments": {}}}],
    [CALL | {"more": 1}],
)
FUNCTION = {"type": "function", "function": {"name": "f"}}
TAG = {"begin": "a", "schema": {}, "end": "b"}


def bounds(schema: Any, name: str) -> Iterator[Any]:
    """The values of a keyword, wherever it is in a schema."""
    if isinstance(schema, dict):
        yield from (value for key, value in schema.items() if key == name and isinstance(value, int | float))
        yield from itertools.chain.from_iterable(bounds(value, name) for value in schema.values())
    elif isinstance(schema, list):
        yield from itertools.chain.from_iterable(bounds(item, name) for item in schema)


def all_bounds(*names: str) -> list[Any]:
    return sorted({value for name in names for value in bounds(schemas(True) | schemas(False), name)})


def around(values: list[Any], step: float) -> Iterator[Any]:
    """Each bound, and what is just beyond and just within it."""
    return itertools.chain.from_iterable((value - step, value, value + step) for value in values)


def formats() -> Iterator[Any]:
    """Forms of an answer, good and bad."""
    schemas: list[Any] = [{}, {"type": "object"}, "{}", "[]", "x", [], 5, None]
    for schema, name in itertools.product(schemas, ("n", "a b", "n" * 65, "", None, 5)):
        yield {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    for key, value in (("description", 5), ("description", None), ("strict", "x"), ("strict", False), ("more", 1)):
        yield {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, key: value}}
    texts: list[Any] = ["a", "", 5, ["a"], [], [""], [1], None]
    members = [("json", schemas), *((name, texts) for name in ("regex", "choice", "grammar"))]
    for name, values in members:
        yield from ({name: value} for value in values)
        yield from ({name: values[0], "json_object": wanted} for wanted in (True, False, None, 1))
    for key, value in itertools.product(
        ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"), (None, True, False, " ", 5)
    ):
        yield {"json": {}, key: value}
    yield from tags()


def tags() -> Iterator[Any]:
    """Structural tags, in both of their forms."""
    structures: list[Any] = [[TAG], [TAG | {"schema": None}], [TAG | {"begin": 1}], [], None, {}, [1]]
    for structure, triggers in itertools.product(structures, (["a"], [""], [], None)):
        tag = {"structures": structure, "triggers": triggers}
        yield from (tag, {"type": "structural_tag", **tag}, {"structural_tag": tag}, {"format": {}, **tag})
    for kind, form in itertools.product(("structural_tag", "tag", None), ({}, [], None, "{}")):
        tag = {"type": kind, "format": form}
        yield from (tag, {"structural_tag": tag})


def choices() -> Iterator[Any]:
    """Choices of tools."""
    for tool in toolboxes():
        yield {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tool}}
        yield from tool[:1]
    for mode in ("required", "none", None):
        yield {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [FUNCTION]}}


def toolboxes() -> Iterator[Any]:
    """Lists of tools."""
    for name in ("f", "a.b", "f" * 64, "f" * 65, "", None, 5):
        yield [{"type": "function", "function": {"name": name}}]
    for key, value in (("description", 5), ("parameters", {}), ("parameters", "{}"), ("strict", None), ("strict", 1)):
        yield [FUNCTION | {"function": {"name": "f", key: value}}]
    for kind, value in itertools.product(("function", "custom", None), (None, {}, "f")):
        yield [FUNCTION, {"type": kind, "function": value}]
    for count in (2, 128, 129):
        yield [FUNCTION] * count


def samples() -> list[Any]:
    """Values at every bound of every parameter, and of every JSON type."""
    ranges = all_bounds("minimum", "maximum")
    numbers = [*around(ranges, 1), *around(ranges, 0.25), *map(float, ranges)]
    lengths = [int(most) for most in all_bounds("maxLength", "minLength")]
    texts = ["x" * max(0, length) for length in around(lengths, 1)]
    counts = [int(most) for most in all_bounds("maxItems", "minItems") if most <= 1024]
    lists = [[item] * max(0, int(count)) for item in ("x", 1) for count in around(counts, 1)]
    lists += [[1.0], [-1], [2**31], ["x", 1], [True], [None], [""], ["x" * 2000], ["text"], ["text", "audio"]]
    keys = ["0", "7", "007", "-1", "1.5", "x", "", "9" * 9, "9" * 10]
    objects = [{key: bias} for key in keys for bias in (1, -100, 100.5, "1", None)]
    objects += [{str(token): 1 for token in range(count)} for count in (1023, 1024, 1025)]
    objects += [{"type": kind} for kind in ("text", "json_object", "json_schema", "structural_tag", "xml", None)]
    objects += [*formats(), *choices()]
    objects += [{name: 1} for name in ("a_1", "messages", "tools", "_a", "ä", "a" * 64, "a" * 65)]
    objects += [{f"a{number}": number for number in range(count)} for count in (64, 65)]
    objects += [
        {"include_usage": wanted, "continuous_usage_stats": often}
        for wanted in (True, False, None, 1)
        for often in (True, False, None, "x")
    ]
    kinds = [*UNSUPPORTED.values(), *(row.parameter.values for row in rows())]
    neutral = [value for kind in kinds for value in getattr(kind, "neutral", ())]
    words = ["none", "auto", "required", "low", "max", "huge", "{", "[]", "null"]
    return [None, True, False, 0, "", [], {}, *words, *numbers, *texts, *lists, *objects, *neutral, *toolboxes()]


SAMPLES = samples()


def is_taken(endpoint: str, body: dict[str, Any]) -> bool:
    """Whether the validator takes a body, parameters that contradict each other aside."""
    found = ENDPOINTS[endpoint]
    try:
        read_parameters(body, found.is_chat)
        found.read_prompt(found.prompt_of(body), 1)
    except ApiError:
        return False
    return True


def is_valid(endpoint: str, body: dict[str, Any]) -> bool:
    return bool(Draft202012Validator(SCHEMAS[endpoint]).is_valid(body))


def good(endpoint: str) -> dict[str, Any]:
    return {"model": "m"} | ({"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {"prompt": "x"})


@pytest.mark.parametrize("endpoint", [CHAT, pytest.param(COMPLETIONS, marks=pytest.mark.proof)])
def test_a_parameter_takes_the_values_of_its_schema(endpoint: str) -> None:
    taken = dict.fromkeys(schemas(endpoint == CHAT), 0)
    for name, schema in schemas(endpoint == CHAT).items():
        validator = Draft202012Validator(schema)
        for value in SAMPLES:
            body = good(endpoint) | {name: value}
            found = is_taken(endpoint, body)
            assert found == validator.is_valid(value), (name, repr(value)[:100], schema)
            taken[name] += found
    assert all(0 < count < len(SAMPLES) for count in taken.values()), taken


@given(
    endpoint=st.sampled_from([CHAT, COMPLETIONS]),
    chosen=st.dictionaries(st.sampled_from([*schemas(True), "unheard_of"]), st.sampled_from(SAMPLES), max_size=4),
)
def test_a_body_is_taken_where_the_schema_takes_it(endpoint: str, chosen: dict[str, Any]) -> None:
    body = good(endpoint) | chosen
    assert is_taken(endpoint, body) == is_valid(endpoint, body)


@pytest.mark.parametrize("text", ["{}", ' {"type":\n"object"}\t', "[{}]", "x{}", "{}x", "", "{"])
def test_a_schema_may_be_text_that_looks_like_an_object(text: str) -> None:
    """Whether it is JSON inside is beyond a schema."""
    for body in ({"guided_json": text}, {"structured_outputs": {"json": text}}):
        for endpoint in ENDPOINTS:
            assert is_taken(endpoint, good(endpoint) | body) == is_valid(endpoint, good(endpoint) | body)


@pytest.mark.proof
def test_messages_are_taken_where_the_schema_takes_them() -> None:
    count = 0
    names = ({}, {"name": "x"}, {"name": 5}, {"tool_call_id": "x"}, {"reasoning": "x"}, {"reasoning_content": 5})
    for role, content, calls, name in itertools.product(ROLES, CONTENTS, TOOL_CALLS, names):
        message = {"role": role, "content": content, "tool_calls": calls, **name}
        given = {key: value for key, value in message.items() if value is not None}
        for messages in ([message], [given], [{"role": "user", "content": "x"}, given]):
            body = {"model": "m", "messages": messages}
            found = is_taken(CHAT, body)
            assert found == is_valid(CHAT, body), messages
            count += found
    assert count > 100
    for messages in ([], {}, "x", None, [5], [{"role": "user", "content": "x"}] * 10_001):
        assert not is_valid(CHAT, {"model": "m", "messages": messages})


@pytest.mark.parametrize(
    "prompt",
    [None, "x", "", [1], [1.0], [-1], [2**31], ["x"], [""], ["x", 1], [[1]], [[1], []], [[1], ["x"]], [[1], "x"], [],
     {}, 5, True, [True], [None], ["x"] * 512, ["x"] * 513, [[1]] * 513, [5] * 600],
    ids=lambda prompt: repr(prompt)[:20],
)  # fmt: skip
def test_prompts_are_taken_where_the_schema_takes_them(prompt: Any) -> None:
    body = {"model": "m", "prompt": prompt}
    assert is_taken(COMPLETIONS, body) == is_valid(COMPLETIONS, body)


def test_a_completion_without_a_prompt_is_the_beginning_of_a_text() -> None:
    messages = [{"role": "user", "content": "x"}]
    for body in ({}, {"prompt": None}, {"prompt": ""}):
        assert is_valid(COMPLETIONS, {"model": "m", **body})
        assert parse_call(COMPLETIONS, {"model": "m", **body}).prompts == [""]
    for body in ({}, {"prompt": None}, {"prompt": "x"}):
        body = {"model": "m", "messages": messages, **body}
        assert is_taken(COMPLETIONS, body) == is_valid(COMPLETIONS, body) == (body.get("prompt") == "x")


def test_every_default_is_what_its_parameter_takes() -> None:
    """And a call that names the defaults is the call that names nothing."""
    for endpoint in (CHAT, COMPLETIONS):
        named = {row.name: row.default for row in rows() if isinstance(row.default, bool | int | float)}
        assert parse_call(endpoint, good(endpoint) | named) == parse_call(endpoint, good(endpoint))


def test_a_file_has_a_column_for_each_parameter_of_a_line() -> None:
    assert {row.name for row in rows()} - set(FILE_COLUMNS) == {"stream", "stream_options"}
