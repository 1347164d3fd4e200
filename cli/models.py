"""`sdcpctl models`: model directories."""

from __future__ import annotations

from pathlib import Path

import click

from cli.errors import CtlError
from cli.text import echo


@click.group()
def models() -> None:
    """Make model directories."""


@models.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="of the weights that are written",
)
def import_(file: Path, directory: Path, dtype: str) -> None:
    """Make a Hugging Face DIRECTORY of a GGUF FILE: weights, tokenizer, chat template.

    Needs: pip install 'sdcpd[engine,gguf]'.
    """
    try:
        from sdcpd.engine.api import ModelError
        from sdcpd.engine.gguf_import import import_gguf
    except ImportError as e:
        raise CtlError(f"{e.name} is not installed: pip install 'sdcpd[engine,gguf]'") from e
    try:
        import_gguf(file, directory, dtype=dtype, report=echo)
    except ModelError as e:
        raise CtlError(str(e)) from e
    echo(f"{directory} is ready: name it in [verifier.model] path")
