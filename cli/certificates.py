"""`sdcpctl certs`: make, list and check the certificates of a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.errors import CtlError
from cli.output import output_option, show_list
from cli.text import echo, table

if TYPE_CHECKING:
    from certs.authority import Authority, Leaf
    from certs.commands import CertificateInfo

OUT = Path("sdcpd-pki")
TRUST_DOMAIN = "sdcp.internal"  # as in the configuration
LEVELS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "error": ("FAIL", "red")}


class SpecParam(click.ParamType[str]):
    """`ROLE/NAME=BASE_URI`, refused as a usage error."""

    name = "spec"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, once it can be read."""
        import difflib

        from certs.authority import ROLES, CertsError
        from certs.commands import parse_spec

        try:
            spec = parse_spec(value)
        except CertsError as e:
            self.fail(f"{e}, as in verifier/v0=https://gpu1.lab:7443/", param, ctx)
        for role in spec.roles:
            if role not in ROLES:
                close = difflib.get_close_matches(role, ROLES, n=1)
                hint = (
                    f'; did you mean "{close[0]}"?' if close else f"; roles are {', '.join(ROLES)}"
                )
                self.fail(f'"{value}": there is no role "{role}"{hint}', param, ctx)
        return value


_out = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=OUT, show_default=True
)
_san = click.option(
    "--san",
    "sans",
    multiple=True,
    metavar="HOST",
    help="host name or address that the instances have beside that of their base URI; repeatable",
)
_days = click.option("--days", type=click.IntRange(1, 3650), default=90, show_default=True)


@click.group()
def certs() -> None:
    """Make, list and check certificates."""


@certs.command()
@click.option(
    "--trust-domain", help=f"name of the cluster in every certificate; default: {TRUST_DOMAIN}"
)
@_out
@_san
@_days
@click.argument("specs", nargs=-1, type=SpecParam(), metavar="ROLE/NAME=BASE_URI...")
def init(
    *,
    trust_domain: str | None,
    out: Path,
    sans: tuple[str, ...],
    days: int,
    specs: tuple[str, ...],
) -> None:
    """Make a certificate authority and the certificates of instances.

    Can be run again: it keeps the authority and every certificate that is still good.
    """
    from certs import commands
    from certs.authority import load_authority

    with _certs_errors():
        if trust_domain is None:
            exists = (out / "ca.crt").exists()
            trust_domain = load_authority(out).trust_domain if exists else TRUST_DOMAIN
        result = commands.init(out, trust_domain, specs, sans=sans, days=days)
    authority = result.authority
    verb = "Created" if result.authority_created else "Kept"
    echo(
        f'{verb} CA "{authority.trust_domain} SDCP CA"   {authority.crt_path}   '
        f"until {authority.certificate.not_valid_after_utc:%Y-%m-%d}   "
        f"sha256 {_short(authority.fingerprint)}"
    )
    kept = [[f"  {_who(one.roles, one.name)}", str(one.path), "kept", ""] for one in result.kept]
    _echo_leaves(result.issued, kept)
    pairs = [(one.roles[0], one.name, one.base_uri) for one in result.issued]
    pairs += [(one.roles[0], one.name, _base_uri(one)) for one in result.kept]
    _echo_next(authority, pairs)


@certs.command()
@_out
@_san
@_days
@click.argument("specs", nargs=-1, required=True, type=SpecParam(), metavar="ROLE/NAME=BASE_URI...")
def issue(*, out: Path, sans: tuple[str, ...], days: int, specs: tuple[str, ...]) -> None:
    """Issue certificates, replacing older ones of the same role and name."""
    from certs import commands
    from certs.authority import load_authority

    with _certs_errors():
        authority = load_authority(out)
        leaves = commands.issue(out, specs, sans=sans, days=days)
    _echo_leaves(leaves, [])
    _echo_next(authority, [(one.roles[0], one.name, one.base_uri) for one in leaves])
    echo("A running sdcpd takes them at: systemctl reload 'sdcpd@*'   (or kill -HUP its process)")


@certs.command()
@_out
@_days
@click.option("--if-needed", is_flag=True, help="only those past two thirds of their life")
@click.argument("names", nargs=-1, metavar="[NAME|ROLE/NAME]...")
def renew(*, out: Path, days: int, if_needed: bool, names: tuple[str, ...]) -> None:
    """Issue certificates again with the names they have; all of a folder if none is named."""
    from certs import commands
    from certs.authority import load_authority

    with _certs_errors():
        authority = load_authority(out)
        leaves = commands.renew(out, names, if_needed=if_needed, days=days)
    if not leaves:
        echo("nothing is due")
        return
    _echo_leaves(leaves, [])
    _echo_next(authority, [(one.roles[0], one.name, one.base_uri) for one in leaves])
    echo("A running sdcpd takes them by itself once they are there")


@certs.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True), default=OUT)
@output_option
def show(path: Path, output: str) -> None:
    """List what is in a certificate, or in each of a folder."""
    from certs import commands

    with _certs_errors():
        infos = commands.show(path)
    now = datetime.now(UTC)
    if output in ("json", "jsonl"):
        shown = [_as_json(info, now) for info in infos]
        show_list(shown, (), name="certificates", output=output)
        return
    for info in infos:
        echo(str(info.path))
        rows = [("subject", info.subject), ("issuer", info.issuer)]
        rows += [("uri", uri) for uri in info.uris] + [("host", host) for host in info.hosts]
        rows += [("valid", _validity(info, now)), ("sha256", _colons(info.fingerprint))]
        for line in table([(f"  {key}", value) for key, value in rows]):
            echo(line)


@certs.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True), default=OUT)
@output_option
def check(path: Path, output: str) -> None:
    """Check keys, dates, authority and file modes; exits 1 if anything fails."""
    from certs import commands

    with _certs_errors():
        findings = commands.check(path)
    found = [{"level": one.level, "path": str(one.path), "text": one.text} for one in findings]
    if output in ("json", "jsonl"):
        show_list(found, (), name="findings", output=output)
    else:
        words = [LEVELS[one.level] for one in findings]
        rows = [
            (click.style(word, fg=colour), one["path"], one["text"])
            for (word, colour), one in zip(words, found, strict=True)
        ]
        echo("\n".join(table(rows)))
    failed = sum(one.level == "error" for one in findings)
    if failed:
        raise CtlError(f"{failed} of {len(findings)} failed")


@contextmanager
def _certs_errors() -> Iterator[None]:
    """A task of `certs` that fails says so in one sentence."""
    from certs.authority import CertsError

    try:
        yield
    except CertsError as e:
        raise CtlError(str(e)) from e
    except OSError as e:
        raise CtlError(f"{e.filename}: {e.strerror}") from e


def _echo_leaves(leaves: Sequence[Leaf], kept: Sequence[Sequence[str]]) -> None:
    rows = [
        [
            f"  {_who(leaf.roles, leaf.name)}",
            f"{leaf.crt_path.with_suffix('')}.{{crt,key}}",
            leaf.uris[0],
            f"until {leaf.not_after:%Y-%m-%d}",
        ]
        for leaf in leaves
    ]
    for line in table([*rows, *kept]):
        echo(line)


def _echo_next(authority: Authority, pairs: Sequence[tuple[str, str, str | None]]) -> None:
    """What to copy where, and what the configuration must then say."""
    from cli.next_step import next_steps

    for line in next_steps(authority.crt_path.parent, authority.trust_domain, pairs):
        echo(line)


def _who(roles: Sequence[str], name: str) -> str:
    return f"{','.join(roles)}/{name}"


def _base_uri(info: CertificateInfo) -> str | None:
    return next((uri for uri in info.uris if not uri.startswith("spiffe:")), None)


def _as_json(info: CertificateInfo, now: datetime) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "subject": info.subject,
        "issuer": info.issuer,
        "uris": list(info.uris),
        "hosts": list(info.hosts),
        "not_before": info.not_before.isoformat(),
        "not_after": info.not_after.isoformat(),
        "days_left": round(info.days_left(now), 2),
        "sha256": info.fingerprint,
    }


def _validity(info: CertificateInfo, now: datetime) -> str:
    span = f"{info.not_before:%Y-%m-%d %H:%MZ} to {info.not_after:%Y-%m-%d %H:%MZ}"
    left = info.days_left(now)
    return f"{span} ({'expired' if left < 0 else f'{left:.0f} days left'})"


def _colons(fingerprint: str) -> str:
    return bytes.fromhex(fingerprint).hex(":")


def _short(fingerprint: str) -> str:
    return f"{_colons(fingerprint)[:8]}:..:{fingerprint[-2:]}"
