from __future__ import annotations

import pytest

from tests.kit.conformance import ROOT, holding_tests, requirements
from tests.mutants.faults import Fault, faults

PRODUCT = ("sdcpd/", "tiers/", "certs/")


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: f"{fault.id} {fault.breaks}")
def test_a_fault_can_be_planted(fault: Fault) -> None:
    """Its text stands once in a file of the product, which still compiles with it."""
    assert fault.file.startswith(PRODUCT) and fault.breaks
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.find) == 1
    assert fault.replace != fault.find
    compile(text.replace(fault.find, fault.replace), fault.file, "exec")


def test_faults_are_of_requirements_that_tests_hold() -> None:
    """Each id is a row, and at least one test names it."""
    rows = {row.id for row in requirements()}
    tests = holding_tests()
    for fault in faults():
        assert fault.id in rows and tests[fault.id], fault.id
