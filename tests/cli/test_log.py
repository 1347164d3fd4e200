"""`sdcpctl log`: what it makes of its arguments; the rest is in tests/e2e/test_by_hand.py."""

from __future__ import annotations

import pytest

from tests.kit.by_hand import sdcpctl


@pytest.mark.parametrize(
    "session", ["-pECAwQFBgcICQoLDA0ODw", "-oECAwQFBgcICQoLDA0ODw", "--ECAwQFBgcICQoLDA0ODw"]
)
@pytest.mark.parametrize("command", [("show",), ("fence", "--yes")])
def test_an_id_may_begin_with_a_dash(session: str, command: tuple[str, ...]) -> None:
    for arguments in ((*command, session, "-o", "json"), (*command, "-o", "json", session)):
        done = sdcpctl("log", *arguments, "--endpoint", "unix:/nowhere/router.sock")
        assert done.returncode == 3 and "there is no admin socket" in done.stderr, done.stderr
