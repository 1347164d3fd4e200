"""What the documentation shows: links, command lines, and pieces of configuration files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from cli.__main__ import main as sdcpctl
from cli.certificates import SpecParam
from sdcpd.__main__ import main as sdcpd

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, click.Command] = {"sdcpctl": sdcpctl, "sdcpd": sdcpd}
GENERATED = {"commands.md", "conformance.md"}
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "certs" / "README.md"]
    + [path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED]
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_SECTION = re.compile(r"\[\[?[a-z.]+\]\]?$")
_END = {"|", "&&", ";", ">"}
_LEADING = {"ExecStart=", "sudo"}


def links(page: Path) -> Iterator[str]:
    """Relative targets of links and images, and pages that are named in code."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target and not target.startswith("#"):
            yield target.partition("#")[0]


def named_files(page: Path) -> Iterator[str]:
    """Pages and scripts that are named in code, as `docs/api.md` or `api.md`."""
    for code in _INLINE.findall(page.read_text("utf-8")):
        if re.fullmatch(r"[A-Za-z0-9_./-]+\.(md|sh)", code) and not code.startswith("/"):
            yield code


def blocks(page: Path) -> Iterator[list[str]]:
    """Indented blocks, without their indentation; list items go on with less than four spaces."""
    block: list[str] = []
    for line in [*page.read_text("utf-8").split("\n"), "end"]:
        if line.startswith("    "):
            block.append(line[4:])
        elif block:
            yield block
            block = []


def files(page: Path) -> Iterator[str]:
    """Blocks that are a piece of sdcpd.toml."""
    for block in blocks(page):
        if _SECTION.fullmatch(block[0].strip()):
            yield "\n".join(block)


def command_lines(page: Path) -> Iterator[list[str]]:
    """Words of each line that runs one of our programs, in blocks and in code within text."""
    shown = [line for block in blocks(page) for line in _joined(block)]
    shown += [code for code in _INLINE.findall(page.read_text("utf-8")) if " " in code]
    for line in shown:
        for words in _commands(line):
            if Path(words[0]).name in PROGRAMS:
                yield [Path(words[0]).name, *words[1:]]


def _joined(block: list[str]) -> list[str]:
    return "\n".join(block).replace("\\\n", " ").split("\n")


def _commands(line: str) -> Iterator[list[str]]:
    # Brackets stand around what may be left away, and dots for more of the same.
    line = re.sub(r"\[(--[^\]]*)\]", r"\1", line)
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    one: list[str] = []
    for word in [*words, ";"]:
        if word in _END:
            if one:
                yield one
            one = []
        elif word != "..." and not re.fullmatch(r"[A-Z_]+=.*", word):
            one.append(word)


def parse(words: list[str]) -> None:
    """Let click read a command line without running it; raises click.UsageError."""
    command, arguments = PROGRAMS[words[0]], words[1:]
    context = click.Context(command, info_name=words[0])
    while True:
        values, rest, _ = command.make_parser(context).parse_args(list(arguments))
        _check_values(command, values, context)
        if not isinstance(command, click.Group):
            if rest:
                raise click.UsageError(f"too many arguments: {rest}", context)
            return
        rest = [*context._protected_args, *rest]
        if not rest:
            return
        name, *arguments = rest
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name}", context)
        command, context = found, click.Context(found, info_name=name, parent=context)


def _check_values(
    command: click.Command, values: dict[str, object], context: click.Context
) -> None:
    """Choices and specs alone: other values may be placeholders."""
    for param in command.params:
        given = values.get(param.name or "")
        if isinstance(param.type, click.Choice | SpecParam) and given:
            for one in given if isinstance(given, list | tuple) else [given]:
                if isinstance(one, str):
                    param.type.convert(one, param, context)
