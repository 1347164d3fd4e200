"""Where a bucket is, as it is configured."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_ENDPOINTS_OF_AWS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Place:
    """A bucket, a prefix in it, and where the keys to it lie; the keys themselves are not here.

    What is empty or None is taken from the environment's AWS_* variables.
    """

    bucket: str
    prefix: str = "sdcpd"
    endpoint: str = ""
    region: str = ""
    access_key_id_file: Path | None = None
    secret_access_key_file: Path | None = None

    @property
    def address(self) -> str:
        """The endpoint's URL; empty for that of AWS in the region."""
        return self.endpoint or next(
            (url for name in _ENDPOINTS_OF_AWS if (url := os.environ.get(name))), ""
        )

    @property
    def where(self) -> str:
        """Bucket and server, in words for people."""
        return f"the bucket {self.bucket} at {self.address or 'AWS'}"
