"""The official JavaScript client: one node process runs a suite against the stack, another one
against a server with a model.
"""

from tests.support.batch_stack import BatchStack
from tests.support.javascript import run_javascript


def test_the_javascript_clients_suite(stack: BatchStack) -> None:
    run_javascript("suite.js", stack.api_url)


def test_the_suite_of_answers_with_structure(model_url: str) -> None:
    run_javascript("structured.js", model_url)
