"""What `sdcpctl certs` does, as functions that return data; the command line renders it."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization

from certs.authority import Authority, Leaf, create_authority, leaf_paths, load_authority
from certs.authority import issue as issue_leaf
from certs.files import CertsError

# A certificate is due for renewal when two thirds of its life are over.
RENEW_AFTER = 2 / 3

_SPIFFE_ID = re.compile(r"spiffe://[^/]+/sdcp/([^/]+)/(.+)")


@dataclass(frozen=True, slots=True)
class Spec:
    """One `ROLE/NAME=BASE_URI` (several roles are joined by commas)."""

    roles: tuple[str, ...]
    name: str
    base_uri: str | None


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """One certificate file, read."""

    path: Path
    subject: str
    issuer: str
    is_authority: bool
    roles: tuple[str, ...]
    name: str
    uris: tuple[str, ...]
    hosts: tuple[str, ...]
    not_before: datetime
    not_after: datetime
    fingerprint: str

    def days_left(self, now: datetime) -> float:
        """Days until expiry, negative after it."""
        return (self.not_after - now).total_seconds() / 86400

    def is_due(self, now: datetime) -> bool:
        """Whether it should be renewed by now."""
        return now >= self.not_before + (self.not_after - self.not_before) * RENEW_AFTER


@dataclass(frozen=True, slots=True)
class InitResult:
    """What `init` made and what it kept."""

    authority: Authority
    authority_created: bool
    issued: tuple[Leaf, ...]
    kept: tuple[CertificateInfo, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `check` found; `level` is "ok", "warning" or "error"."""

    level: str
    path: Path
    text: str


def parse_spec(text: str) -> Spec:
    """Read `ROLE[,ROLE]/NAME[=BASE_URI]`; raises CertsError."""
    who, _, base_uri = text.partition("=")
    roles, slash, name = who.partition("/")
    if not slash or not roles or not name:
        raise CertsError(f'"{text}" must look like ROLE/NAME=BASE_URI')
    return Spec(tuple(roles.split(",")), name, base_uri or None)


def init(
    out: Path | str,
    trust_domain: str,
    specs: Sequence[str],
    *,
    sans: Sequence[str] = (),
    days: float = 90,
) -> InitResult:
    """Make an authority, or keep the one there, and issue what is missing; raises CertsError."""
    parsed = [parse_spec(text) for text in specs]
    folder = Path(out)
    created = not (folder / "ca.crt").exists() and not (folder / "ca.key").exists()
    if created:
        authority = create_authority(folder, trust_domain=trust_domain)
    else:
        authority = load_authority(folder)
        if authority.trust_domain != trust_domain:
            raise CertsError(
                f'{folder} holds the authority of "{authority.trust_domain}", not of '
                f'"{trust_domain}"; choose another folder'
            )
    issued: list[Leaf] = []
    kept: list[CertificateInfo] = []
    for spec in parsed:
        current = _still_good(folder, spec, authority=authority, sans=sans)
        if current is not None:
            kept.append(current)
        else:
            issued.append(_issue_spec(folder, spec, sans=sans, days=days))
    return InitResult(authority, created, tuple(issued), tuple(kept))


def issue(
    out: Path | str, specs: Sequence[str], *, sans: Sequence[str] = (), days: float = 90
) -> tuple[Leaf, ...]:
    """Issue certificates, replacing older ones of the same role and name; raises CertsError."""
    parsed = [parse_spec(text) for text in specs]
    return tuple(_issue_spec(Path(out), spec, sans=sans, days=days) for spec in parsed)


def renew(
    out: Path | str, names: Sequence[str], *, if_needed: bool = False, days: float = 90
) -> tuple[Leaf, ...]:
    """Issue certificates of a folder again, as they are; raises CertsError.

    `names` are NAME or ROLE/NAME, none for all. With `if_needed` only those that are due.
    """
    folder = Path(out)
    load_authority(folder)
    infos = [info for info in show(folder) if info.roles]
    unknown = [name for name in names if not any(_is_named(info, name) for info in infos)]
    if unknown:
        known = ", ".join(f"{info.roles[0]}/{info.name}" for info in infos) or "none"
        raise CertsError(f"{folder} has no certificate of {', '.join(unknown)}; there are: {known}")
    now = datetime.now(UTC)
    return tuple(
        issue_leaf(
            folder,
            role=info.roles,
            name=info.name,
            base_uri=next((uri for uri in info.uris if not uri.startswith("spiffe:")), None),
            sans=info.hosts,
            days=days,
        )
        for info in infos
        if not names or any(_is_named(info, name) for name in names)
        if not if_needed or info.is_due(now)
    )


def show(out: Path | str) -> tuple[CertificateInfo, ...]:
    """Every certificate of a folder (or one file), the authority first; raises CertsError."""
    path = Path(out)
    files = [path] if path.is_file() else sorted(path.glob("*.crt"))
    if not files:
        raise CertsError(f"{path} holds no certificate (*.crt)")
    return tuple(sorted((_read(one) for one in files), key=lambda info: not info.is_authority))


def check(out: Path | str, *, now: datetime | None = None) -> tuple[Finding, ...]:
    """Whether the certificates of a folder can be used; raises CertsError when none is there."""
    moment = now or datetime.now(UTC)
    folder = Path(out) if Path(out).is_dir() else Path(out).parent
    findings: list[Finding] = []
    authorities = _load_all(folder / "ca.crt") if (folder / "ca.crt").exists() else []
    if not authorities:
        findings.append(Finding("error", folder / "ca.crt", "missing: peers cannot be verified"))
    for info in show(out):
        problems = _check_dates(info, moment)
        if not info.is_authority:
            problems += _check_leaf(info, authorities)
        findings += problems or [
            Finding("ok", info.path, f"{info.subject}, {info.days_left(moment):.0f} days left")
        ]
    if (folder / "ca.key").exists():
        findings += _check_mode(folder / "ca.key", forbidden=0o077, wanted="0600")
    return tuple(findings)


def _is_named(info: CertificateInfo, name: str) -> bool:
    return name in (info.name, *(f"{role}/{info.name}" for role in info.roles))


def _issue_spec(folder: Path, spec: Spec, *, sans: Sequence[str], days: float) -> Leaf:
    return issue_leaf(
        folder, role=spec.roles, name=spec.name, base_uri=spec.base_uri, sans=sans, days=days
    )


def _still_good(
    folder: Path, spec: Spec, *, authority: Authority, sans: Sequence[str]
) -> CertificateInfo | None:
    """The certificate that already fits a spec, if it need not be replaced."""
    crt_path, key_path = leaf_paths(folder, role=spec.roles[0], name=spec.name)
    if not crt_path.exists() or not key_path.exists():
        return None
    info = _read(crt_path)
    wanted = {f"spiffe://{authority.trust_domain}/sdcp/{role}/{spec.name}" for role in spec.roles}
    if spec.base_uri is not None:
        wanted.add(spec.base_uri)
    fits = set(info.uris) == wanted and set(sans) <= set(info.hosts)
    problems = _check_leaf(info, [authority.certificate])
    return info if fits and not problems and not info.is_due(datetime.now(UTC)) else None


def _check_dates(info: CertificateInfo, now: datetime) -> list[Finding]:
    end = f"{info.not_after:%Y-%m-%d %H:%MZ}"
    again = "" if info.is_authority else "; replace it with: sdcpctl certs issue"
    if now > info.not_after:
        return [Finding("error", info.path, f"expired {end}{again}")]
    if now < info.not_before:
        text = f"not valid before {info.not_before:%Y-%m-%d %H:%MZ}; check the clock of this host"
        return [Finding("error", info.path, text)]
    if info.is_due(now):
        return [Finding("warning", info.path, f"expires {end}{again}")]
    return []


def _check_leaf(info: CertificateInfo, authorities: list[x509.Certificate]) -> list[Finding]:
    findings: list[Finding] = []
    leaf, *intermediates = _load_all(info.path)
    if not any(_signed_by(leaf, one) for one in [*intermediates, *authorities]):
        text = f'signed by "{info.issuer}", which is not the authority of this folder'
        findings.append(Finding("error", info.path, text))
    if not info.uris:
        text = "carries no URI name, so no peer could tell who it is"
        findings.append(Finding("error", info.path, text))
    key_path = info.path.with_suffix(".key")
    if not key_path.exists():
        findings.append(Finding("error", key_path, f"missing, the key of {info.path.name}"))
        return findings
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        findings.append(Finding("error", key_path, f"cannot be read: {error}"))
        return findings
    if key.public_key() != leaf.public_key():
        findings.append(Finding("error", key_path, f"is not the key of {info.path.name}"))
    return findings + _check_mode(key_path, forbidden=0o037, wanted="0640")


def _check_mode(path: Path, *, forbidden: int, wanted: str) -> list[Finding]:
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & forbidden:
        return []
    return [Finding("error", path, f"open to others (mode {mode:04o}); run: chmod {wanted} {path}")]


def _signed_by(leaf: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _load_all(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CertsError(f"{path} cannot be read as a certificate: {error}") from error


def _read(path: Path) -> CertificateInfo:
    certificate = _load_all(path)[0]
    uris, hosts = _names(certificate)
    identities = [match for match in map(_SPIFFE_ID.fullmatch, uris) if match]
    return CertificateInfo(
        path=path,
        subject=_common_name(certificate.subject),
        issuer=_common_name(certificate.issuer),
        is_authority=_is_authority(certificate),
        roles=tuple(match[1] for match in identities),
        name=identities[0][2] if identities else "",
        uris=uris,
        hosts=hosts,
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _names(certificate: x509.Certificate) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return (), ()
    addresses = names.get_values_for_type(x509.IPAddress)
    return (
        tuple(names.get_values_for_type(x509.UniformResourceIdentifier)),
        (*names.get_values_for_type(x509.DNSName), *map(str, addresses)),
    )


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return constraints.value.ca


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()
