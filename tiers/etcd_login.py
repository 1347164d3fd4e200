"""The token with which etcd knows its user, had for a password and got anew when it is gone.

etcd forgets a token that is not used for some minutes, and all of them when a member is restarted.
The call that finds that out was not performed, so that it may be repeated with another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tiers.api import TierError
from tiers.etcd_errors import Refused
from tiers.secret_file import secret_of

Authenticate = Callable[[str, str], Awaitable[str]]
"""From name and password to a token; raises EtcdError."""


class Login:
    """One user of etcd; the password is read for each token, so that a new one is taken."""

    def __init__(self, user: str, password_file: Path) -> None:
        """Raises TierError for a file that can't be used."""
        self._user, self._file = user, password_file
        self._lock = asyncio.Lock()
        self._token: str | None = None
        self.password()

    def password(self) -> str:
        """Raises TierError."""
        return secret_of(self._file, setting="[mlc.etcd] password_file", what="password")

    async def token(self, authenticate: Authenticate) -> str:
        """Return the token, got now if there is none; raises EtcdError."""
        async with self._lock:
            if self._token is None:
                self._token = await authenticate(self._user, self._password_now())
            return self._token

    def _password_now(self) -> str:
        try:
            return self.password()
        except TierError as error:
            raise Refused(str(error)) from error

    def drop(self, token: str) -> None:
        """A token was refused; another may be there already."""
        if self._token == token:
            self._token = None
