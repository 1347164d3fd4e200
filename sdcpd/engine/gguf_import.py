"""A Hugging Face directory out of a GGUF file, by transformers and gguf (extra `gguf`)."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdcpd.engine.api import ModelError
from sdcpd.engine.model_config import DTYPES, read_config

_MAGIC = b"GGUF"


def import_gguf(file: Path, directory: Path, *, dtype: str, report: Callable[[str], None]) -> None:
    """Write weights, tokenizer and chat template of a GGUF file to a directory that is not there.

    Quantised tensors are dequantised and stored as `dtype`. Raises ModelError, and then there is
    no directory.
    """
    _check(file, directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    except OSError as e:
        raise ModelError(f"{directory}: cannot be made ({e.strerror}); name another one") from e
    try:
        _convert(file, scratch, DTYPES[dtype], report)
        read_config(scratch)  # what sdcpd cannot run is said now
        scratch.chmod(0o755)
        scratch.rename(directory)
    except ModelError as e:
        raise ModelError(str(e).replace(str(scratch), str(file))) from e
    except OSError as e:
        raise ModelError(f"{directory}: cannot be written ({e.strerror or e})") from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check(file: Path, directory: Path) -> None:
    if os.path.lexists(directory):
        raise ModelError(f"{directory} exists already; name a directory that does not")
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as e:
        raise ModelError(f"{file}: not readable ({e.strerror}); check the path") from e
    if magic != _MAGIC:
        raise ModelError(f"{file}: no GGUF file: it does not begin with GGUF; fetch it again")


def _convert(file: Path, out: Path, dtype: torch.dtype, report: Callable[[str], None]) -> None:
    report(f"reading {file.name}")
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as e:
        raise ModelError(f"{e.name or e} is not installed: pip install 'sdcpd[gguf]'") from e
    except Exception as e:  # of whatever kind the libraries have for files that they cannot read
        raise ModelError(f"{file}: cannot be read: {_one_line(e)}") from e
    # Such a model counts as quantised and can't be saved: its tensors go into a plain one.
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    plain = type(model)(config).to(dtype)
    plain.load_state_dict(model.state_dict())
    report(f"writing {sum(one.numel() for one in plain.parameters()):,} parameters")
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
