"""The listener of the OpenAI-compatible API, beside a router."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from sdcpd import settings
from sdcpd.config import Config
from sdcpd.engine.tokenizer import TextModel
from sdcpd.parts import Instance, Parts, StartError, reason
from sdcpd.reload import Reloads
from sdcpd.transport.http1 import Http1Server
from sdcpd.transport.https import HttpsIdentity
from sdcpd.transport.identity_files import IdentityError

if TYPE_CHECKING:
    from sdcpd.roles.api_counts import ApiCounts
    from sdcpd.roles.router import Router

log = logging.getLogger("sdcpd")


def api_uri(config: Config) -> str | None:
    """Where clients reach the model, if they can."""
    if config.api is None:
        return None
    host, port = config.api.listen
    scheme = "https" if config.api.tls.cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"


def https_identity(config: Config, instance: Instance) -> HttpsIdentity | None:
    """What `[api.tls]` names; None for plain HTTP. Raises IdentityError."""
    tls = config.api.tls if config.api else None
    if tls is None or not tls.cert:
        return None
    return HttpsIdentity(cert=instance.fill(tls.cert), key=instance.fill(tls.key))


def _tls(parts: Parts, instance: Instance) -> ssl.SSLContext | None:
    """The context of the listener, which is kept up to date; raises StartError."""
    try:
        identity = https_identity(parts.config, instance)
    except IdentityError as e:
        raise StartError(f"[api.tls]: {e}", status=78) from e
    if identity is None:
        return None
    parts.certificates.add(identity)
    parts.api_certificate = identity
    return identity.context


async def start_api(
    parts: Parts, reloads: Reloads, router: Router, text: TextModel, instance: Instance
) -> ApiCounts | None:
    """Serve clients if `[api]` is there; returns what is counted of them. Raises StartError."""
    section = parts.config.api
    if section is None:
        return None
    from sdcpd.roles.api_access import KeysError
    from sdcpd.roles.frontend import FrontEnd

    try:
        api = settings.api_settings(section, parts.config)
        front_end = FrontEnd(router, text, api, tracer=parts.tracer(instance))
    except KeysError as e:
        raise StartError(f"[api] keys_file: {e}", status=78) from e
    parts.stack.push_async_callback(front_end.aclose)
    reloads.on_reload(front_end.reload_keys)

    def configure(new: Config) -> None:
        try:
            front_end.configure(settings.api_settings(new.api or section, new))
        except KeysError as e:  # told by reload_keys as well
            log.error("[api] keeps its settings: %s", e)

    reloads.on_change(configure)
    parts.run_until_closed(front_end.write_first_text(), name="first text")
    host, port = section.listen
    server = Http1Server(
        front_end.handle,
        host=host,
        port=port,
        refuse=front_end.refuse,
        body_bytes_max=section.body_max,
        tls=_tls(parts, instance),
    )
    try:
        await server.start()
    except OSError as e:
        raise StartError(
            f"API: cannot listen on {host}:{port}: {reason(e)}; stop the other program or "
            "choose another [api] listen",
            status=1,
        ) from e
    parts.stack.push_async_callback(server.aclose)
    log.info("API: %s", api_uri(parts.config))
    return front_end.counts
