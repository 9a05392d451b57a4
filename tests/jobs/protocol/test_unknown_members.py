"""Members of bodies that no parameter has are named, with the parameter that may be meant."""

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.pooling_parameters import EMBEDDINGS
from jobs.protocol.results import ApiError
from jobs.protocol.unknown_members import MOST_UNKNOWN, OTHERS, UnknownMember, UnknownMembers, check_members, described

OFFICIAL = {
    CHAT: chat_create_params.CompletionCreateParamsBase,
    COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
    EMBEDDINGS: embedding_create_params.EmbeddingCreateParams,
}


@pytest.mark.parametrize("url", OFFICIAL)
def test_all_that_the_official_client_can_send_is_known(url: str) -> None:
    check_members(OFFICIAL[url].__annotations__, BATCH_ENDPOINTS[url])


def test_an_unknown_member_is_refused_with_the_nearest_parameter() -> None:
    with pytest.raises(ApiError) as refusal:
        check_members({"model": "m", "max_token": 5}, BATCH_ENDPOINTS[CHAT], "body.")
    assert (refusal.value.code, refusal.value.param) == ("unknown_parameter", "body.max_token")
    assert refusal.value.message == "Unknown parameter: 'body.max_token'. Did you mean 'body.max_tokens'?"
    with pytest.raises(ApiError, match=r"'xyzzy'\.$"):
        check_members({"xyzzy": 5}, BATCH_ENDPOINTS[CHAT])


def test_lines_are_counted_by_name_and_names_are_bounded() -> None:
    counted, chat = UnknownMembers(), BATCH_ENDPOINTS[CHAT]
    for number in range(MOST_UNKNOWN + 5):
        counted.add({"max_token": 1, f"{number:03}": 1, "model": "m"}, chat)
    first, second, *others = counted.listed()
    assert first == UnknownMember("max_token", MOST_UNKNOWN + 5, "max_tokens")
    assert second == UnknownMember(OTHERS, 6)
    assert len(others) == MOST_UNKNOWN - 1
    counted = UnknownMembers()
    counted.add(map(str, range(1000)), chat)
    assert len(counted.listed()) == MOST_UNKNOWN + 1
    assert described([first, others[0]]) == "max_token (105 lines; did you mean max_tokens?), 000 (1 line)"
