"""From a model directory to a ready engine: load, check, warm up, name."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sdcpd.engine.api import KV_BLOCK_TOKENS, EngineInfo, ModelError
from sdcpd.engine.batching import WINDOW_SHARE
from sdcpd.engine.digests import cache_file
from sdcpd.engine.drafters import ROW_TOKENS_MAX, ModelDrafter
from sdcpd.engine.fingerprint import fingerprint
from sdcpd.engine.model import LlamaModel
from sdcpd.engine.model_config import DTYPES, read_config
from sdcpd.engine.model_files import model_digest, tokenizer_digest
from sdcpd.engine.model_settings import ModelSettings
from sdcpd.engine.parallel import Followers
from sdcpd.engine.runner import PASS_ROWS_MAX, Runner
from sdcpd.engine.self_check import choose_shape
from sdcpd.engine.shard import Shard
from sdcpd.engine.target import LlamaTarget
from sdcpd.engine.weights import Weights

Report = Callable[[str], None]
MIB = 1 << 20
KV_TOKENS_MIN = 512  # of the memory for keys and values; with less nobody could ask for anything


def load_target(
    settings: ModelSettings,
    *,
    rows_max: int = PASS_ROWS_MAX,
    window: float = WINDOW_SHARE,
    report: Report,
) -> LlamaTarget:
    """The target engine; `rows_max` and `window` as LlamaTarget has them.

    Raises ModelError with one sentence for a person.
    """
    runner = _load(settings, report=report)
    info = _checked(settings, runner, report=report)
    return LlamaTarget(runner, info, rows_max=rows_max, window=window)


def load_twins(settings: ModelSettings, *, report: Report) -> tuple[LlamaTarget, ModelDrafter]:
    """The target, and a drafter of the same weights, which is always right; raises ModelError.

    Both are in this process.
    """
    assert settings.tensor_parallel == 1, "the drafter has no processes of its own"
    runner = _load(settings, report=report)
    target = LlamaTarget(runner, _checked(settings, runner, report=report))
    twin = Runner(
        runner.model,
        kv_octets_max=settings.kv_octets_max,
        shape=runner.shape,
        backend=_backend(settings, runner.model.device),
    )
    twin.warm_up()
    drafter = ModelDrafter(twin, target.info)
    return target, drafter


def _checked(settings: ModelSettings, runner: Runner, *, report: Report) -> EngineInfo:
    """What a model is, after its shape of passes has been found; raises ModelError."""
    begin = time.monotonic()
    try:
        exact = choose_shape(runner)
        runner.warm_up()
        info = _info(settings, runner, exact=exact, report=report)
    except BaseException:
        runner.close()
        raise
    report(
        f"self-check {time.monotonic() - begin:.1f} s: rows are "
        f"{'independent of their batch' if exact else 'NOT independent of it: scores may vary'}"
    )
    return info


def load_drafter(
    settings: ModelSettings, *, top_k: int = ROW_TOKENS_MAX, report: Report
) -> ModelDrafter:
    """The draft model's engine; raises ModelError."""
    runner = _load(settings, report=report)
    return ModelDrafter(runner, _checked(settings, runner, report=report), top_k=top_k)


def load_part(settings: ModelSettings, shard: Shard, *, report: Report = lambda _: None) -> Runner:
    """A runner over one process's part of a model that is spread; raises ModelError."""
    model = _model(settings, shard, report)
    return Runner(
        model, kv_octets_max=settings.kv_octets_max, backend=_backend(settings, model.device)
    )


def _load(settings: ModelSettings, *, report: Report) -> Runner:
    shard = Shard(0, settings.tensor_parallel)
    followers = None
    if shard.count > 1:
        shard.part_of(read_config(settings.path))  # what cannot be divided is said at once
        followers = Followers(settings, shard.count - 1)
    try:
        model = _model(settings, shard, report)
        if followers is not None:
            followers.meet(model.device)
            report(f"spread over {shard.count} processes")
        runner = _runner(settings, model, followers)
        _check_memory(runner, settings.kv_octets_max, report)
    except BaseException:
        if followers is not None:
            followers.close()
        raise
    return runner


def _runner(settings: ModelSettings, model: LlamaModel, followers: Followers | None) -> Runner:
    try:
        return Runner(
            model,
            kv_octets_max=settings.kv_octets_max,
            followers=followers,
            backend=_backend(settings, model.device),
        )
    except (OSError, ValueError, torch.OutOfMemoryError) as e:
        raise ModelError(
            f"kv_memory: {settings.kv_octets_max / MIB:.0f} MiB cannot be had here ({e}); give less"
        ) from e


def _backend(settings: ModelSettings, device: torch.device) -> str | None:
    on = device.type == "cuda" if settings.compile == "auto" else settings.compile
    return "inductor" if on else None


def _model(settings: ModelSettings, shard: Shard, report: Report) -> LlamaModel:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    config = read_config(settings.path)
    tokenizer_digest(settings.path)  # what is missing is said before minutes of loading
    device = _device(settings.device, shard.rank)
    dtype = config.dtype if settings.dtype == "auto" else DTYPES[settings.dtype]
    begin = time.monotonic()
    weights = Weights(settings.path, dtype, report=report)
    try:
        lay_out = _backend(settings, device) is None
        model = LlamaModel(config, weights, device=device, shard=shard, lay_out=lay_out)
    except ModelError as e:
        raise ModelError(f"model directory {settings.path}: {e}") from e
    report(
        f"weights {time.monotonic() - begin:.1f} s: {config.architecture}, {config.layers} layers, "
        f"{str(dtype).removeprefix('torch.')} on {device}"
    )
    return model


def _check_memory(runner: Runner, have: int, report: Report) -> None:
    pool = runner.pool
    if pool.tokens_max < KV_TOKENS_MIN:
        need = KV_TOKENS_MIN // KV_BLOCK_TOKENS * pool.block_octets
        raise ModelError(
            f"kv_memory: {have >> 10} KiB hold keys and values of {pool.tokens_max} tokens of this "
            f"model; give at least {-(-need // MIB)} MiB, which hold {KV_TOKENS_MIN}"
        )
    report(
        f"keys and values: {have // MIB} MiB for {pool.tokens_max} tokens of all sessions, "
        f"of one at most {runner.context_max}"
    )


def _device(name: str, rank: int = 0) -> torch.device:
    """The device of a setting; of a model that is spread, each process has the next GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ModelError(
            f'device = "{name}": torch knows no such device; "auto", "cpu" and "cuda:0" are some'
        ) from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f'device = "{name}": torch finds no CUDA device here; check the driver '
            '(nvidia-smi), or set device = "cpu"'
        )
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + rank)
        if device.index >= torch.cuda.device_count():
            raise ModelError(
                f"{device} is wanted, and there are {torch.cuda.device_count()} GPUs here; "
                "correct device or tensor_parallel"
            )
        torch.cuda.set_device(device)
    return device


def _info(settings: ModelSettings, runner: Runner, *, exact: bool, report: Report) -> EngineInfo:
    model = runner.model
    digest = model_digest(settings.path, remembered=cache_file(), report=report)
    if settings.model not in (None, digest):
        raise ModelError(
            f"model directory {settings.path}: its weights have the digest sha256:{digest.hex()}, "
            "and digest in the configuration is another one; put the right weights there, or "
            "correct digest"
        )
    return EngineInfo(
        name=settings.path.resolve().name,
        model=digest,
        tokenizer=settings.tokenizer or tokenizer_digest(settings.path),
        vocab=model.config.vocab,
        context_max=runner.context_max,
        fingerprint=fingerprint(runner),
        exact=exact,
    )
