"""The kinds of values that name what is outside this process: etcd, buckets, a collector."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

from sdcpd.config_values import as_text


def _endpoint(value: object) -> str:
    host, _, port = as_text(value).rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError('must be host and port, as in "etcd1.lab:2379"')
    if "/" in host:
        raise ValueError(
            'must be host and port without a scheme, as in "etcd1.lab:2379"; ca says that it is TLS'
        )
    return as_text(value)


def _key_prefix(value: object) -> str:
    text = as_text(value)
    if not re.fullmatch(r"[A-Za-z0-9._/-]{1,128}", text) or text.endswith("/"):
        raise ValueError(
            "may hold 1 to 128 letters, digits, dots, dashes, underscores and slashes, and ends"
            ' with no slash, as in "sdcpd/logs"'
        )
    return text


def _bucket(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", value):
        raise ValueError('must be the name of a bucket, as in "sdcpd-cache"')
    return value


def _s3_prefix(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*", value):
        raise ValueError('may hold letters, digits, dash, underscore and / between, as in "sdcpd"')
    return value


def _s3_endpoint(value: object) -> str:
    # The value may hold a password, so it is not shown by what refuses it.
    if not isinstance(value, str) or not re.fullmatch(r"(https?://[^/@?#\s]+/?)?", value):
        raise ValueError('must be a URL without path and user, as in "https://s3.lab:9000"')
    return value.rstrip("/")


def _collector(value: object) -> str:
    # As above.
    if not isinstance(value, str) or not re.fullmatch(
        r"(https?://[^/@?#\s]+(/[^@?#\s]*)?)?", value
    ):
        raise ValueError('must be a URL without user, as in "http://127.0.0.1:4318"')
    return value.rstrip("/")


def _s3_region(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9-]{0,64}", value):
        raise ValueError('must be the name of a region, as in "eu-central-1"')
    return value


Endpoint = Annotated[str, BeforeValidator(_endpoint)]
KeyPrefix = Annotated[str, BeforeValidator(_key_prefix)]
Bucket = Annotated[str, BeforeValidator(_bucket)]
S3Prefix = Annotated[str, BeforeValidator(_s3_prefix)]
S3Endpoint = Annotated[str, BeforeValidator(_s3_endpoint)]
S3Region = Annotated[str, BeforeValidator(_s3_region)]
Collector = Annotated[str, BeforeValidator(_collector)]
