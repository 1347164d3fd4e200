"""`sdcpctl models`: model directories, their digests, and which models the cluster has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cli.asking import ask_router, endpoint_option
from cli.errors import CtlError
from cli.output import output_option, show_json, show_list, show_one
from cli.text import echo, remark, shows_progress

COLUMNS = (("MODEL", "short"), ("ROLE", "role"), ("INSTANCES", "names"))
WIDE = (("DIGEST", "digest"),)
SHORT = len("sha256:") + 12
directory_argument = click.argument(
    "directory", type=click.Path(path_type=Path, exists=True, file_okay=False)
)


@click.group()
def models() -> None:
    """Look at models of the cluster and on disk; make model directories."""


@models.command("list")
@endpoint_option
@output_option
def list_(endpoint: Path | None, output: str) -> None:
    """List the models of the router's verifiers and drafters, by the digests of their weights."""
    found = [one for one in models_of(ask_router(endpoint)) if one["digest"] is not None]
    show_list(found, COLUMNS, name="models", output=output, wide=WIDE, none="no instance yet")


@models.command("hash")
@directory_argument
@output_option
def hash_(directory: Path, output: str) -> None:
    """Print the digests of a model DIRECTORY, as `digest` and [[peers]] `model` take them."""
    show_one(_digests(directory), output=output)


@models.command()
@directory_argument
@click.option("--digest", help='what its weights must have, "sha256:..."')
@endpoint_option
@output_option
def verify(directory: Path, digest: str | None, endpoint: Path | None, output: str) -> None:
    """Tell whether a model DIRECTORY is whole, and whose model of the cluster it is.

    Exit 1 if anything is missing, cut short or not supported, or if it has another --digest.
    """
    told: list[str] = []
    as_json = output in ("json", "jsonl")

    def tell(line: str) -> None:
        told.append(line)
        if not as_json:
            echo(line)

    for line in _checked(directory):
        tell(line)
    found = _digests(directory)
    if not as_json:
        echo("\n".join(f"{name} {value}" for name, value in found.items()))
    if digest is not None and digest.removeprefix("sha256:") != found["weights"][7:]:
        raise CtlError(f"{directory} is another model than {digest}; fetch it again")
    for line in _whose(found, endpoint):
        tell(line)
    checks = [dict(zip(("level", "text"), line.split(None, 1), strict=True)) for line in told]
    show_json({**found, "checks": checks}, output=output)


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


def models_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Models that instances of a router have told, with who has them; verifiers' first."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for one in answer["instances"]:
        found.setdefault((one["role"], one.get("model")), []).append(one["instance"])
    return [
        {
            "digest": digest,
            "short": digest and digest[:SHORT],
            "role": role,
            "instances": names,
            "names": ", ".join(names),
        }
        for (role, digest), names in sorted(
            found.items(), key=lambda item: (item[0][0] != "verifier", item[0][1] is None, item)
        )
    ]


def _digests(directory: Path) -> dict[str, str]:
    from sdcpd.engine.api import ModelError
    from sdcpd.engine.digests import cache_file
    from sdcpd.engine.model_files import (
        check_whole,
        model_digest,
        tokenizer_digest,
        weight_files,
    )

    def report(text: str) -> None:
        if shows_progress():
            remark(text)

    try:
        for file in weight_files(directory):
            check_whole(file)
        weights = model_digest(directory, remembered=cache_file(), report=report)
        tokenizer = tokenizer_digest(directory)
    except ModelError as e:
        raise CtlError(str(e)) from e
    return {"weights": f"sha256:{weights.hex()}", "tokenizer": f"sha256:{tokenizer.hex()}"}


def _checked(directory: Path) -> Iterator[str]:
    """A line for each thing that is as it should be; raises CtlError for what is not."""
    from sdcpd.engine.api import ModelError
    from sdcpd.engine.model_files import check_whole, weight_files
    from sdcpd.engine.tokenizer import TextModel

    try:
        files = weight_files(directory)
        count = sum(map(check_whole, files))
        yield f"ok  {count} tensors in {len(files)} files, none cut short"
        text = TextModel.load(directory)
        yield f"ok  tokenizer with {text.vocab} tokens, context of {text.context_max}"
        try:
            from sdcpd.engine.model_config import read_config
        except ImportError:
            yield "?   architecture: not looked at, for torch is not installed here"
            return
        read_config(directory)
        yield "ok  architecture supported"
    except ModelError as e:
        raise CtlError(str(e)) from e


def _whose(found: dict[str, str], endpoint: Path | None) -> Iterator[str]:
    """Which instances have that model; nothing is wrong where no router can be asked."""
    try:
        answer = ask_router(endpoint)
    except CtlError as e:
        if endpoint is not None:
            raise
        yield f"?   not compared with a cluster: {e}"
        return
    for one in models_of(answer):
        if one["digest"] == found["weights"]:
            yield f"ok  the model of {one['role']} {one['names']}"
            break
    else:
        yield "?   no instance of the cluster has it"
    if answer.get("tokenizer") not in (None, found["tokenizer"]):
        yield "!   its tokenizer is not the router's: neither target nor drafter of this cluster"
