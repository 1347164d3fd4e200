"""What makes two engines the same, and a model the one that was meant (D-C9, D-O10)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sdcpd.engine.api import ModelError
from sdcpd.engine.fingerprint import _cpu_name, fingerprint
from sdcpd.engine.load import load_drafter, load_target
from sdcpd.engine.model_files import model_digest
from sdcpd.engine.model_settings import ModelSettings
from tests.engine.conftest import runner_of


def edited(source: Path, folder: Path, **members: Any) -> Path:
    """The same weights with another config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **members}))
    return folder


def test_the_same_directory_twice_is_one_engine(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    copy = edited(tiny[1], tmp_path / "copy")
    assert fingerprint(runner_of(tiny[1])) == fingerprint(runner_of(copy))


@pytest.mark.parametrize(
    "members",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"max_position_embeddings": 256},
    ],
)
def test_a_shape_that_was_edited_is_another_engine(
    tiny: tuple[Any, Path], tmp_path: Path, members: dict[str, Any]
) -> None:
    """Its weights have the digest that they had, and its KV is no longer the same."""
    other = edited(tiny[1], tmp_path / "edited", **members)
    assert model_digest(other) == model_digest(tiny[1])
    assert fingerprint(runner_of(other)) != fingerprint(runner_of(tiny[1]))


def test_dtypes_and_threads_are_others(tiny: tuple[Any, Path]) -> None:
    prints = {fingerprint(runner_of(tiny[1], dtype)) for dtype in (torch.float32, torch.half)}
    torch.set_num_threads(2)
    prints.add(fingerprint(runner_of(tiny[1])))
    torch.set_num_threads(1)
    assert len(prints) == 3


def test_the_processor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: A  Fast CPU @ 3 GHz\nmodel name\t: other\n")
    assert _cpu_name(path) == "A-Fast-CPU-@-3-GHz"
    assert _cpu_name(tmp_path / "none") == _cpu_name(tmp_path / "none") != ""


@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_weights_that_are_not_those_pinned_are_refused(load: Any, tiny: tuple[Any, Path]) -> None:
    settings = ModelSettings(tiny[1], threads=1, model=bytes(32))
    with pytest.raises(ModelError, match="have the digest sha256:") as raised:
        load(settings, report=lambda _: None)
    assert model_digest(tiny[1]).hex() in str(raised.value)


async def test_weights_that_are_those_pinned_are_taken(tiny: tuple[Any, Path]) -> None:
    settings = ModelSettings(tiny[1], threads=1, model=model_digest(tiny[1]))
    engine = load_target(settings, report=lambda _: None)
    assert engine.info.model == settings.model
    await engine.aclose()
