"""What a command does not expect ends it with a sentence, never with a traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import click

from cli.errors import EXIT_FAILED, EXIT_UNREACHABLE, CtlError

DEBUG = "SDCPCTL_DEBUG"
ASKED = "cli.asked"
"""Where a context's `meta` has the socket that was asked last."""
_OUTPUT = frozenset({errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT})
_OTHER_KINDS = (TypeError, AttributeError, LookupError, ValueError, RecursionError)


class Guarded(click.Group):
    """A group that tells whatever is raised below it."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's; what fails while usage and help are printed is told as well."""
        try:
            return super().main(*args, **extra)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise  # of a caller that wants them
        except Exception as e:
            _told(e, None).show()
            raise SystemExit(EXIT_FAILED) from e

    def invoke(self, ctx: click.Context) -> Any:
        """As click's; raises CtlError for what else is raised."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as e:
            if isinstance(e, OSError) and e.errno == errno.EPIPE:
                raise  # click ends quietly: who read has gone
            raise _told(e, ctx.meta.get(ASKED)) from e


def _told(error: Exception, asked: object) -> CtlError:
    """A sentence for what was raised; `asked` is the socket whose answer is at work."""
    from sdcpd.admin_client import AdminUnreachable

    if os.environ.get(DEBUG):
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    if isinstance(error, AdminUnreachable):
        return CtlError(str(error), status=EXIT_UNREACHABLE)
    if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT:
        _silence()
        return CtlError(
            f"standard output cannot be written: {error.strerror}.  Make room, or send it elsewhere"
        )
    what = f"{type(error).__name__}: {error}"[:300]
    if asked is not None and isinstance(error, _OTHER_KINDS):
        return CtlError(
            f"what {asked} answers is not understood ({what}): it is no admin socket of this"
            " version of sdcpd; compare with sdcpctl version, or name another --endpoint",
            status=EXIT_UNREACHABLE,
        )
    return CtlError(
        f"sdcpctl has a fault ({what}).  Report it with the file that sdcpctl bugreport writes;"
        f" {DEBUG}=1 shows where it is"
    )


def _silence() -> None:
    """What is left in the buffer goes nowhere, so that the end of the process does not fail too."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
