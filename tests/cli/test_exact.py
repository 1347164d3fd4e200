"""`sdcpctl verify-exact` on the bundled pair, and on what is no model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.exact import PROMPT
from sdcpd.engine.api import ModelError
from sdcpd.exact.command import verify
from tests.kit.dev import PAIR, environment


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "verify-exact", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_target_is_exact(dtype: str) -> None:
    """Every case of the matrix gives one text, and every event took place."""
    done = run(
        *(str(PAIR / "target"), "--drafter", str(PAIR / "drafter"), "--dtype", dtype),
        *("--m-max", "4", "--tokens", "16", "-o", "json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["differ"], found["did_not_happen"]) == (0, 0)
    assert len({one["digest"] for one in found["cases"]}) == 2
    assert len(found["cases"]) == 2 * (3 + 5 * (4 + 1) + 6)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"prompt": "Too short."}, "tokens, and KV of it is kept and found again only from 65"),
        ({"tokens": 4096}, "beyond the model's context of"),
        ({"device": "nosuch"}, 'device = "nosuch": torch knows no such device'),
    ],
)
async def test_what_cannot_be_tried_is_said(wish: dict[str, Any], told: str) -> None:
    usual: dict[str, Any] = {
        "device": "cpu",
        "dtype": "auto",
        "tokens": 4,
        "ms": [1],
        "prompt": PROMPT,
        "report": lambda _: None,
        "told": lambda _: None,
    }
    with pytest.raises(ModelError, match=re.escape(told)):
        await verify(PAIR / "target", None, **usual | wish)


@pytest.mark.slow
def test_what_is_no_model_is_said_in_one_sentence(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "does not exist" in done.stderr
