"""The vectors themselves: made by the script beside them, and none left without a test."""

import json
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
# Sections whose entries need a verifier's session machine; its own tests read them.
WITH_A_MACHINE = {"proposal_order", "output"}


def test_vectors_are_what_the_script_makes() -> None:
    command = [sys.executable, str(TESTS / "make_vectors.py"), "--check"]
    assert subprocess.run(command, cwd=TESTS, check=False, capture_output=True).returncode == 0


def test_every_section_is_read_by_a_test() -> None:
    sections = set(json.loads((TESTS / "vectors.json").read_text())) - {"format", "about"}
    sources = "".join(
        path.read_text() for path in (TESTS / "protocol").glob("*.py") if path != Path(__file__)
    )
    assert not {name for name in sections - WITH_A_MACHINE if f'["{name}"]' not in sources}
