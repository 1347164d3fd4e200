"""The certificate tool: what `sdcpctl certs` makes, keeps, shows and finds (D-I1, D-Z1)."""

from __future__ import annotations

import asyncio
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from certs import CertsError, create_authority, issue
from certs.commands import check, init, parse_spec, show
from certs.commands import issue as issue_specs
from certs.probe import probe_peer
from sdcpd.transport.http import Request, Response
from sdcpd.transport.server import Server
from tests.kit.certs import CertKit

SPECS = ["router/r0=https://10.0.0.5:7441/", "verifier/v0=https://gpu1.lab:7443/"]


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_d_z1_leaf_has_spiffe_id_base_uri_host_and_both_purposes(tmp_path: Path) -> None:
    create_authority(tmp_path, trust_domain="lab.example")
    leaf = issue(
        tmp_path, role="verifier", name="v0", base_uri="https://gpu1.lab:7443/", sans=["10.0.0.9"]
    )
    certificate = load(leaf.crt_path)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == ["spiffe://lab.example/sdcp/verifier/v0", "https://gpu1.lab:7443/"]
    assert names.get_values_for_type(x509.DNSName) == ["gpu1.lab"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.9"]
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical
    assert usage.value.digital_signature
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"


def test_authority_names_its_trust_domain_and_is_never_overwritten(tmp_path: Path) -> None:
    authority = create_authority(tmp_path, trust_domain="lab.example")
    names = authority.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.value.get_values_for_type(x509.UniformResourceIdentifier) == [
        "spiffe://lab.example"
    ]
    with pytest.raises(CertsError, match="already holds an authority"):
        create_authority(tmp_path, trust_domain="lab.example")
    replaced = create_authority(tmp_path, trust_domain="lab.example", overwrite=True)
    assert replaced.fingerprint != authority.fingerprint


def test_keys_are_for_their_owner_only_and_no_temporary_file_stays(tmp_path: Path) -> None:
    init(tmp_path, "lab.example", SPECS)
    for key in tmp_path.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert {path.suffix for path in tmp_path.iterdir()} == {".crt", ".key"}


def test_several_roles_in_one_certificate(tmp_path: Path) -> None:
    create_authority(tmp_path, trust_domain="lab.example")
    (leaf,) = issue_specs(tmp_path, ["router,front_end/r0=https://r0.lab:7441/"])
    assert leaf.crt_path.name == "router.r0.crt"
    assert show(leaf.crt_path)[0].roles == ("router", "front_end")


def test_init_is_idempotent_and_issue_replaces(tmp_path: Path) -> None:
    first = init(tmp_path, "lab.example", SPECS)
    assert (first.authority_created, len(first.issued)) == (True, 2)
    second = init(tmp_path, "lab.example", [*SPECS, "admin/alice"])
    assert not second.authority_created
    assert [leaf.name for leaf in second.issued] == ["alice"]
    assert [info.name for info in second.kept] == ["r0", "v0"]
    moved = init(tmp_path, "lab.example", ["router/r0=https://10.0.0.6:7441/"])
    assert moved.issued[0].base_uri == "https://10.0.0.6:7441/"
    before = load(tmp_path / "router.r0.crt").serial_number
    issue_specs(tmp_path, ["router/r0=https://10.0.0.6:7441/"])
    assert load(tmp_path / "router.r0.crt").serial_number != before
    with pytest.raises(CertsError, match=r'authority of "lab\.example"'):
        init(tmp_path, "other.example", SPECS)


def test_show_lists_the_authority_first(tmp_path: Path) -> None:
    init(tmp_path, "lab.example", SPECS)
    infos = show(tmp_path)
    assert [info.subject for info in infos] == ["lab.example SDCP CA", "router/r0", "verifier/v0"]
    assert 89 < infos[1].days_left(datetime.now(UTC)) <= 90


def test_check_finds_what_is_wrong(tmp_path: Path) -> None:
    init(tmp_path, "lab.example", SPECS)
    assert {finding.level for finding in check(tmp_path)} == {"ok"}
    later = datetime.now(UTC) + timedelta(days=70)
    assert [one.level for one in check(tmp_path, now=later)] == ["ok", "warning", "warning"]
    assert "expired" in check(tmp_path, now=later + timedelta(days=30))[1].text
    os.chmod(tmp_path / "router.r0.key", 0o644)
    (tmp_path / "verifier.v0.key").write_bytes((tmp_path / "router.r0.key").read_bytes())
    texts = [finding.text for finding in check(tmp_path) if finding.level == "error"]
    assert any("chmod 0640" in text for text in texts)
    assert any("is not the key of verifier.v0.crt" in text for text in texts)
    other = tmp_path / "other"
    create_authority(other, trust_domain="lab.example")
    (tmp_path / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    assert any("not the authority of this folder" in one.text for one in check(tmp_path))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("router", "ROLE/NAME=BASE_URI"),
        ("router/", "ROLE/NAME=BASE_URI"),
        ("king/k0=https://x/", "none of router"),
        ("router/r0", "needs a base URI"),
        ("router/r 0=https://x/", "may hold only"),
        ("router/..=https://x/", "may hold only"),
        ("router/r0=http://x/", "https://HOST:PORT"),
        ("router/r0=https://x/?q", "without query"),
        ("router/r0=https://u@x/", "https://HOST:PORT"),
        ("router/r0=https://x:99999/", "is not a URI"),
    ],
)
def test_bad_specs_are_refused_in_one_sentence(tmp_path: Path, spec: str, text: str) -> None:
    create_authority(tmp_path, trust_domain="lab.example")
    with pytest.raises(CertsError, match=text):
        issue_specs(tmp_path, [spec])


def test_missing_authority_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CertsError, match="sdcpctl certs init"):
        issue_specs(tmp_path, SPECS)
    with pytest.raises(CertsError, match="no certificate"):
        show(tmp_path)
    assert parse_spec("admin/alice").base_uri is None


async def test_probe_tells_whether_a_peer_takes_our_certificate(tmp_path: Path) -> None:
    async def no_content(request: Request) -> Response:
        return Response(204)

    kit, foreign = CertKit(tmp_path / "a"), CertKit(tmp_path / "b")
    server = Server(
        no_content,
        identity=kit.identity("verifier", "v0"),
        host="127.0.0.1",
        port=0,
        body_bytes_max=0,
    )
    address = f"127.0.0.1:{await server.start()}"
    mine, theirs = kit.leaf("drafter", "d0"), foreign.leaf("drafter", "d0")
    good = await asyncio.to_thread(
        probe_peer, address, ca=kit.ca, cert=mine.crt_path, key=mine.key_path
    )
    assert good.tls_version == "TLSv1.3"
    assert good.uris[0] == "spiffe://test.example/sdcp/verifier/v0"
    with pytest.raises(CertsError, match="UNKNOWN_CA"):
        await asyncio.to_thread(
            probe_peer, address, ca=kit.ca, cert=theirs.crt_path, key=theirs.key_path
        )
    with pytest.raises(CertsError, match="certificate that we refuse"):
        await asyncio.to_thread(
            probe_peer, address, ca=foreign.ca, cert=mine.crt_path, key=mine.key_path
        )
    await server.aclose()
    with pytest.raises(CertsError, match="no connection"):
        await asyncio.to_thread(
            probe_peer, address, ca=kit.ca, cert=mine.crt_path, key=mine.key_path
        )
