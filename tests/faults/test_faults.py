"""The list of faults fits the code; `python -m tests.faults` runs it."""

import pytest

from tests.faults.faults import Fault, read_faults
from tests.support.commands import REPOSITORY

FAULTS = read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.old[:40]}")
def test_a_fault_can_be_applied(fault: Fault) -> None:
    text = (REPOSITORY / fault.file).read_text()
    assert fault.applied(text) != text
    assert [test for test in fault.tests if not (REPOSITORY / test).exists()] == []


def test_there_are_enough_of_every_package() -> None:
    packages = [fault.file.split("/")[0] for fault in FAULTS]
    assert len(packages) >= 40
    assert set(packages) == {"jobs", "workers", "api", "pipeline"}
