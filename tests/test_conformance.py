"""The requirements, the tests that name them and the table that shows both agree."""

from __future__ import annotations

import re
from collections import Counter

import cbor2
import pytest
from pycddl import ValidationError

from sdcpd.protocol.codec import encode
from sdcpd.protocol.messages import Action, Event
from tests.kit import cddl
from tests.kit.cluster import cluster
from tests.kit.conformance import TABLE, UNTESTABLE, holding_tests, requirements


def test_every_requirement_has_a_test() -> None:
    """A row without a test is listed with its reason, and there are few of those."""
    tests = holding_tests()
    ids = [row.id for row in requirements()]
    assert len(ids) == len(set(ids)) == 310
    assert sorted(set(ids) - set(tests) - set(UNTESTABLE)) == []
    assert sorted(set(UNTESTABLE) & set(tests)) == []
    assert len(UNTESTABLE) < 5


def test_tests_name_only_requirements_that_exist() -> None:
    """A misspelt id would hold nothing."""
    assert sorted(set(holding_tests()) - {row.id for row in requirements()}) == []


def test_the_table_is_that_of_these_tests(request: pytest.FixtureRequest) -> None:
    """`make conformance` after a change of tests; every row of it has passed."""
    if request.config.getoption("--conformance") is not None:
        pytest.skip("this run writes the table")
    tests = holding_tests()
    rows = re.findall(r"^\| (R-\S+) \| .*? \| (.*) \| (.*?) \|$", TABLE.read_text(), re.M)
    assert [row[0] for row in rows] == [row.id for row in requirements()]
    for requirement, shown, result in rows:
        if requirement in UNTESTABLE:
            continue
        names = [f"tests/{name}" for name in re.findall(r"`(.*?)`", shown)]
        assert names == tests[requirement], requirement
        assert result == "passed", requirement


def test_the_outside_check_sees_a_wrong_message() -> None:
    """R-5.2-18: the validator refuses what the CDDL does not allow."""
    right = Event(session=bytes(16), epoch=1, kind=Action.SWITCH, committed=1, digest=bytes(32))
    cddl.validate("Event", encode(right))
    content = cbor2.loads(encode(right))
    for change in ({"epoch": -1}, {"kind": 6}, {"digest": bytes(31)}, {"more": 1}, {"session": ""}):
        with pytest.raises(ValidationError):
            cddl.validate("Event", cbor2.dumps({**content, **change}))


async def test_a_whole_run_is_seen_by_the_outside_check(messages_sent: Counter[str]) -> None:
    """R-5.2-18: every kind of message that a plain run has passes through the check."""
    before = Counter(messages_sent)
    async with cluster() as made:
        await made.text(count=12)
    kinds = {kind for kind, count in (messages_sent - before).items() if count}
    wanted = {"SessionOpen", "SessionState", "Assignment", "Proposal", "Verdict", "Output"}
    assert wanted | {"Status", "Event", "CommitRecord"} <= kinds
