"""`sdcpctl completion` and `sdcpctl manpages`: what shells and man read."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cli.errors import CtlError
from cli.text import echo


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands and options.

    \b
    bash: sdcpctl completion bash > /etc/bash_completion.d/sdcpctl
    zsh:  sdcpctl completion zsh > "${fpath[1]}/_sdcpctl"
    fish: sdcpctl completion fish > ~/.config/fish/completions/sdcpctl.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None, "one that click has"
    root = context.find_root()
    source = made(root.command, {}, "sdcpctl", "_SDCPCTL_COMPLETE")
    # click asks bash for its version, which is not needed for printing.
    echo(source.source_template % source.source_vars())


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.pass_context
def manpages(context: click.Context, directory: Path) -> None:
    """Write a page for each command, for man, to DIRECTORY."""
    from click_man.core import write_man_pages

    import sdcpd

    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same pages from the same program
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_man_pages(
            "sdcpctl",
            context.find_root().command,
            version=sdcpd.__version__,
            target_dir=str(directory),
        )
    except OSError as e:
        raise CtlError(f"{directory} cannot be written: {e.strerror}") from e
    echo(f"{directory}: {len(list(directory.glob('sdcpctl*.1')))} pages")
