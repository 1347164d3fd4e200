"""How `sdcpctl` fails: one sentence on standard error, and an exit code that scripts can test.

0 done, 1 the operation or check failed, 2 usage, 3 nobody to connect to, 4 refused by TLS or for
want of a role or key, 5 not found.
"""

from __future__ import annotations

from typing import IO, Any

import click

EXIT_FAILED, EXIT_UNREACHABLE, EXIT_REFUSED, EXIT_NOT_FOUND = 1, 3, 4, 5


class CtlError(click.ClickException):
    """What could not be done, why, and what to do."""

    def __init__(self, message: str, *, status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = status  # type: ignore[misc]  # click reads it from the instance

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the sentence alone."""
        click.echo(self.message, file=file, err=file is None)
