"""Engines and tokenizers for the roles; torch is loaded only where a role has a model."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sdcpd import service, settings
from sdcpd.config import Config
from sdcpd.config_sections import DrafterSection, VerifierSection
from sdcpd.engine.api import ModelError
from sdcpd.engine.tokenizer import TextModel
from sdcpd.parts import StartError

if TYPE_CHECKING:
    from sdcpd.engine.api import DraftEngine, TargetEngine

log = logging.getLogger("sdcpd")
T = TypeVar("T")
LOADING = "load"


def is_loading() -> bool:
    """Whether a thread still loads a model, which nothing can stop."""
    return any(one.name == LOADING for one in threading.enumerate())


async def target_engine(section: VerifierSection) -> TargetEngine:
    """Load the target; raises StartError."""
    load = _engine_loader()
    model = load.ModelSettings(**settings.model_settings(section.model))
    return await _loading(
        lambda: load.load_target(
            model,
            rows_max=section.batch_rows,
            window=section.batch_window / 100,
            report=_progress,
        )
    )


async def draft_engine(section: DrafterSection) -> DraftEngine:
    """Load the draft model, or make an n-gram drafter; raises StartError."""
    if section.kind == "ngram":
        from sdcpd.engine.ngram import NgramDrafter

        return NgramDrafter()
    load = _engine_loader()
    model = load.ModelSettings(**settings.model_settings(section.model))
    return await _loading(lambda: load.load_drafter(model, top_k=section.top_k, report=_progress))


def text_model(config: Config) -> TextModel:
    """The tokenizer of the router's model; raises StartError."""
    path = config.router.model if config.router else None
    if path is None and config.verifier is not None:
        path = config.verifier.model.path
    assert path is not None, "checked with the configuration"
    try:
        return TextModel.load(path, name=config.api.model_name if config.api else "")
    except ModelError as e:
        raise StartError(str(e), status=78) from e


async def _loading(load: Callable[[], T]) -> T:
    """Load in a thread that nobody waits for: the loop goes on, and SIGTERM ends the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = load()
        except Exception as e:
            error = e
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            log.debug("the process ended while a model was loading")

    threading.Thread(target=work, name=LOADING, daemon=True).start()
    try:
        return await future
    except ModelError as e:
        raise StartError(str(e), status=78) from e


def _engine_loader() -> Any:
    """The module that needs torch, loaded only by roles that have a model."""
    try:
        from sdcpd.engine import load
    except ImportError as e:
        raise StartError(
            f"this role needs the engine, and {e.name} is not installed here; "
            "install it with: pip install 'sdcpd[engine]'",
            status=78,
        ) from e
    return load


def _progress(text: str) -> None:
    service.notify_starting(text)
    log.info("%s", text)
