"""The official JavaScript client: one node process runs its suite against the stack."""

from tests.support.batch_stack import BatchStack
from tests.support.javascript import run_javascript


def test_the_javascript_clients_suite(stack: BatchStack) -> None:
    run_javascript("suite.js", stack.api_url)
