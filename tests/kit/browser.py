"""A real headless Chromium with a profile that is thrown away, and what it found wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Page

BINARY = shutil.which("chromium")
WAIT_MS = 30_000.0
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Violations of the policy are told to the page alone where they are of no resource.
TELL_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI}`));
"""


def need_chromium() -> None:
    """Skip the test where there is none."""
    if BINARY is None:
        pytest.skip("chromium is not installed")
    pytest.importorskip("playwright", reason="the extra test is not installed")


@dataclass
class Browser:
    """One page."""

    page: Page
    problems: list[str] = field(default_factory=list)
    """Errors of the console, exceptions and violations of the policy; nothing is expected."""

    def took_no_harm(self, *, refused: int | None = None) -> None:
        """Fail if there were problems; a status that was asked for is logged by the browser."""
        expected = f"the server responded with a status of {refused}"
        assert [one for one in self.problems if refused is None or expected not in one] == []

    def note(self, message: ConsoleMessage) -> None:
        """Keep what the console shows as wrong."""
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} {message.location['url']}")


@contextmanager
def chromium(
    profile: Path, *, width: int = 1280, height: int = 860, dark: bool = False, scale: float = 1
) -> Iterator[Browser]:
    """A browser with an empty profile; skips the test where it is missing."""
    need_chromium()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=BINARY,
            headless=True,
            args=OPTIONS,
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=scale,
        )
        try:
            page = context.pages[0]
            page.set_default_timeout(WAIT_MS)
            browser = Browser(page)
            page.on("console", browser.note)
            page.on("pageerror", lambda error: browser.problems.append(str(error)))
            page.add_init_script(TELL_VIOLATIONS)
            yield browser
        finally:
            context.close()
