"""A process that writes objects of 4 MiB to a cache on this host until it is killed.

python -m tests.kit.same_host_client BASE CA CERTIFICATE KEY; a line for each object, with the way.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from sdcpd.transport.client import HttpClient
from sdcpd.transport.local_client import LocalClient
from sdcpd.transport.tls import TlsIdentity


async def main(base: str, ca: str, cert: str, key: str) -> None:
    """Write without end."""
    http = HttpClient(TlsIdentity(ca=Path(ca), cert=Path(cert), key=Path(key)))
    client = LocalClient(http)
    await client.request("OPTIONS", f"{base}objects/scope/q_rows.0")
    body = os.urandom(1 << 20) * 4
    number = 0
    while True:
        number += 1
        uri = f"{base}objects/scope/q_rows.{os.getpid()}.{number % 8}"
        await client.request("DELETE", uri)
        answer = await client.request("PUT", uri, body=body)
        print(answer.status, "local" if client.exchanges == number else "tls", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
