"""The client's names of the API are those of the server."""

from tools.client_vocabulary import VOCABULARY, vocabulary


def test_the_vocabulary_is_that_of_the_code() -> None:
    assert VOCABULARY.read_text() == vocabulary(), "run `make docs`"
