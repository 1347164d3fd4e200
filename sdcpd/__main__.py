"""`sdcpd`: the daemon, and `sdcpd dev`, a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import difflib
import faulthandler
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click

import sdcpd
from sdcpd.config import DEFAULT_PATH, ROLE_NAMES, Config, ConfigError, load_config
from sdcpd.config_values import is_name

EXIT_RUNTIME, EXIT_CONFIG = 1, 78

Wanted = tuple[str, str, str]
ONCE_TOKENS, KILL_TOKENS = 96, 900  # the latter take seconds, so that a death is in the middle
OPENMP_SPINS = "4000"  # some 60 us, about what lies between two matrix products of a pass


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE[-NAME]",
    help="router, verifier or drafter, with the instance's name; repeat for several in one process",
)
@click.option("-c", "--config", "path", type=click.Path(path_type=Path), default=DEFAULT_PATH)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="goes over the file and the environment (SDCPD__SECTION__KEY=VALUE); repeatable",
)
@click.option("--log-level", help="the same as --set log.level=LEVEL")
@click.option("--log-format", help="the same as --set log.format=auto|text|json|journal")
@click.option(
    "--check-config",
    is_flag=True,
    help="check the file, and with --role certificates and model directories, and exit",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="print every key with its value, and exit; sdcpctl config show tells where each is from",
)
@click.version_option(sdcpd.__version__, prog_name="sdcpd")
@click.pass_context
def main(
    context: click.Context,
    *,
    roles: tuple[str, ...],
    path: Path,
    settings: tuple[str, ...],
    log_level: str | None,
    log_format: str | None,
    check_config: bool,
    print_config: bool,
) -> None:
    """Serve a large language model with speculative decoding across machines."""
    # Before anything imports torch: threads that spin at barriers without an end slow each other
    # twentyfold where processes share cores, and threads that sleep at once wake up 240 times a
    # pass, which is a quarter of its time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    if context.invoked_subcommand is not None:
        return
    if not roles and not check_config and not print_config:
        raise click.UsageError("give --role router, verifier or drafter (or: sdcpd dev)")
    given = {"log.level": log_level, "log.format": log_format}
    settings += tuple(f"{key}={value}" for key, value in given.items() if value is not None)
    read = partial(load_config, path, environ=os.environ, settings=settings)
    try:
        config = read()
        wanted = _instances(roles, config, path)
        if check_config:
            _check(config, wanted)
    except ConfigError as e:
        for problem in e.problems:
            click.echo(problem, err=True)
        count = len(e.problems)
        click.echo(f"{count} problem{'s' if count > 1 else ''}; not started.", err=True)
        sys.exit(EXIT_CONFIG)
    if print_config:
        _print(config)
        return
    if check_config:
        click.echo(f"{path}: ok")
        return
    code = _run(config, wanted, read)
    from sdcpd.engines import is_loading

    if is_loading():
        # Ended under a thread that is inside torch, the interpreter would be aborted.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def _print(config: Config) -> None:
    """Each key on a line, as a file could have it."""
    from sdcpd.reload import flat

    for key, value in flat(config).items():
        click.echo(f"{key} = {json.dumps(value, ensure_ascii=False)}")


def _check(config: Config, wanted: Sequence[Wanted]) -> None:
    """Look at certificates and model directories too; raises ConfigError."""
    from sdcpd.check import problems_of
    from sdcpd.config_places import place_problems
    from sdcpd.parts import Instance

    found = problems_of(config, [Instance(role, name, unit) for role, name, unit in wanted])
    here = [role for role in ROLE_NAMES if getattr(config, role) is not None]
    if not wanted and len(here) == 1:  # of several, nothing tells which are to share a process
        found += place_problems(config, [Instance(here[0], config.instance_name(None))])
    if found:
        raise ConfigError(found)


def _instances(roles: Sequence[str], config: Config, path: Path) -> list[Wanted]:
    """(role, name, text of --role) of each; raises ConfigError and UsageError."""
    wanted: list[Wanted] = []
    missing = []
    for text in roles:
        role, dash, name = text.partition("-")
        if role not in ROLE_NAMES:
            close = difflib.get_close_matches(role, ROLE_NAMES, n=1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise click.UsageError(
                f'--role {text}: "{role}" is none of {", ".join(ROLE_NAMES)}{hint}'
            )
        if dash and not is_name(name):
            raise click.UsageError(
                f"--role {text}: a name holds only letters, digits, dot, dash and underscore"
            )
        if any(role == other for other, _, _ in wanted):
            raise click.UsageError(
                f"--role {role} is given twice; start a process for each {role}, "
                "with a configuration file of its own"
            )
        if getattr(config, role) is None:
            missing.append(f"{path}: there is no [{role}] section, which --role {text} needs")
        wanted.append((role, config.instance_name(name or None), text))
    if missing:
        raise ConfigError(missing)
    return wanted


def _run(config: Config, wanted: Sequence[Wanted], read: Callable[[], Config]) -> int:
    import uvloop

    from sdcpd.daemon import Daemon, Instance, StartError
    from sdcpd.logs import set_up_logging
    from sdcpd.transport.tuning import tune_process

    set_up_logging(config.log.level, config.log.format)
    faulthandler.enable()  # systemd's watchdog aborts: the log shows where each thread was
    tune_process()
    instances = [Instance(role, name, unit) for role, name, unit in wanted]
    daemon = Daemon(config, instances, read=read)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(daemon.run())
    except StartError as e:
        logging.getLogger("sdcpd").error("%s", e)
        return e.status
    return 0


@main.command()
@click.option("--once", is_flag=True, help="generate one text, print it, and stop")
@click.option("--prompt", default="The ocean at night", help="what --once continues")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help=f"of --once; default: {ONCE_TOKENS}, with --kill-verifier {KILL_TOKENS}",
)
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(-(1 << 63), (1 << 64) - 1), default=None)
@click.option("--json", "as_json", is_flag=True, help="with --once: one JSON object on one line")
@click.option("--target", type=click.Path(path_type=Path), help="a Hugging Face model directory")
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    metavar="DIR|ngram|none",
    help="repeatable; default: the bundled drafter and ngram (only ngram with --target)",
)
@click.option("--verifiers", type=click.IntRange(1, 16), default=1, show_default=True)
@click.option(
    "--kill-verifier",
    is_flag=True,
    help="with --once and --verifiers 2: write the text again while its verifier is killed, "
    "and show when tokens came",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="of the API, which --once does not open",
)
@click.option(
    "--transport",
    type=click.Choice(["auto", "h2", "h3"]),
    default="auto",
    show_default=True,
    help="between the instances; auto is HTTP/2 unless it is unreachable",
)
@click.option("--keep", type=click.Path(path_type=Path), help="keep certificates and logs there")
def dev(
    *,
    once: bool,
    prompt: str,
    max_tokens: int | None,
    temperature: float,
    seed: int | None,
    as_json: bool,
    kill_verifier: bool,
    target: Path | None,
    drafters: tuple[str, ...],
    verifiers: int,
    port: int,
    transport: str,
    keep: Path | None,
) -> None:
    """Run a router, verifiers and drafters on this machine, over real mutual TLS."""
    if not once and (as_json or seed is not None):
        raise click.UsageError("--json and --seed go with --once")
    if temperature != temperature:
        raise click.UsageError("--temperature must be a number from 0 to 2")
    if kill_verifier and (not once or verifiers < 2):
        raise click.UsageError("--kill-verifier goes with --once, and with --verifiers 2 or more")
    if kill_verifier and temperature > 0 and seed is None:
        raise click.UsageError(
            "--kill-verifier compares two texts, which with --temperature needs a --seed"
        )
    from sdcpd.dev.cluster import DevError
    from sdcpd.dev.command import run_dev
    from sdcpd.dev.plan import DevOptions, OnceRequest, free_ports

    own_port = free_ports(1)[0] if kill_verifier else None
    options = DevOptions(
        target=target,
        drafters=drafters,
        verifiers=verifiers,
        port=own_port if once else port,
        transport=transport,
        keep=keep,
    )
    count = max_tokens or (KILL_TOKENS if kill_verifier else ONCE_TOKENS)
    request = OnceRequest(prompt, count, temperature, seed, as_json, kill_verifier)
    try:
        sys.exit(run_dev(options, request if once else None))
    except DevError as e:
        click.echo(str(e), err=True)
        sys.exit(e.status)


if __name__ == "__main__":
    main()
