"""sdcpctl certs: what it makes, what it says to do next, and what it finds."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from certs.authority import create_authority, issue
from cli.__main__ import main
from sdcpd.config import Config, parse_config
from sdcpd.daemon import Instance
from sdcpd.transport.tls import TlsIdentity
from tests.kit.by_hand import tls_lines

SPECS = ("router/r0=https://10.0.0.5:7442/", "verifier/v0=https://gpu1.lab:7443/")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def certs(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["certs", *arguments], prog_name="sdcpctl")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def good(*arguments: str) -> list[str]:
    result = certs(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_init_makes_an_authority_and_certificates() -> None:
    first, *rest = good("init", "--trust-domain", "lab.example", *SPECS)
    assert re.fullmatch(
        r'Created CA "lab\.example SDCP CA"   sdcpd-pki/ca\.crt   until 20\d\d-\d\d-\d\d   '
        r"sha256 [0-9a-f:]{8}:\.\.:[0-9a-f]{2}",
        first,
    )
    assert rest[0].split()[:3] == [
        "router/r0",
        "sdcpd-pki/router.r0.{crt,key}",
        "spiffe://lab.example/sdcp/router/r0",
    ]
    assert "Keep sdcpd-pki/ca.key in one safe place, off the hosts that serve." in rest
    assert Path("sdcpd-pki/ca.key").stat().st_mode & 0o777 == 0o600
    assert Path("sdcpd-pki/router.r0.key").stat().st_mode & 0o777 == 0o600
    assert rest[-1] == "Check: sdcpctl certs check sdcpd-pki"


def test_init_again_keeps_what_is_good() -> None:
    good("init", "--trust-domain", "lab.example", *SPECS)
    before = {path: path.read_bytes() for path in Path("sdcpd-pki").iterdir()}
    lines = good("init", *SPECS, "drafter/d0=https://gpu1.lab:7444/")
    assert lines[0].startswith('Kept CA "lab.example SDCP CA"')
    assert sum("kept" in line for line in lines) == 2
    assert all(path.read_bytes() == octets for path, octets in before.items())
    assert Path("sdcpd-pki/drafter.d0.crt").exists()


def test_init_of_another_trust_domain_is_refused() -> None:
    good("init", *SPECS)
    result = certs("init", "--trust-domain", "other.example", *SPECS)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        'sdcpd-pki holds the authority of "sdcp.internal", not of "other.example"; '
        "choose another folder\n"
    )


def test_the_default_trust_domain_is_that_of_the_configuration() -> None:
    assert 'CA "sdcp.internal SDCP CA"' in good("init")[0]
    assert Config().node.trust_domain == "sdcp.internal"


def test_without_instances_the_next_step_is_to_issue() -> None:
    last = good("init")[-1]
    assert last.startswith("Next: sdcpctl certs issue --out sdcpd-pki ")
    command = shlex.split(last.removeprefix("Next: sdcpctl certs ").removesuffix(" ..."))
    good(*command)


# ---- the next step is right


def steps(lines: list[str], command: str) -> list[list[str]]:
    return [shlex.split(line) for line in lines if line.strip().startswith(f"{command} ")]


def test_what_to_copy_exists_and_goes_where_the_configuration_looks() -> None:
    lines = good("init", "--trust-domain", "lab.example", "--out", "my pki", *SPECS)
    copies = steps(lines, "scp")
    assert [copy[-1] for copy in copies] == [
        "root@10.0.0.5:/etc/sdcpd/certs/",
        "root@gpu1.lab:/etc/sdcpd/certs/",
    ]
    for (_, *files, target), text in zip(copies, ("router-r0", "verifier-v0"), strict=True):
        assert all(Path(file).is_file() for file in files)
        assert not any("ca.key" in file for file in files)
        folder = Path(target.partition(":")[2])
        role, _, name = text.partition("-")
        instance = Instance(role, name, role)
        tls = Config().tls
        wanted = {instance.fill(template) for template in (tls.ca, tls.cert, tls.key)}
        assert {folder / Path(file).name for file in files} == wanted
    for command in steps(lines, "ssh"):
        assert re.fullmatch(r"chgrp sdcpd (\S+\.key) && chmod 0640 \1", command[2])
    starts = [line.split()[-1] for line in lines if "systemctl enable" in line]
    assert starts == ["sdcpd@router", "sdcpd@verifier"]
    assert [line.split()[-1] for line in lines if "[node]: name" in line] == ['"r0"', '"v0"']
    assert any('trust_domain = "lab.example" in [node]' in line for line in lines)
    assert lines[-1] == "Check: sdcpctl certs check 'my pki'"


def test_files_of_one_host_are_copied_together() -> None:
    lines = good("init", SPECS[1], "drafter/d0=https://gpu1.lab:7444/")
    (copy,) = steps(lines, "scp")
    assert len(copy) == 1 + 5 + 1
    assert "  start there: systemctl enable --now sdcpd@verifier-v0 sdcpd@drafter-d0" in lines
    assert not any("name =" in line for line in lines)


def test_a_router_with_a_name_of_its_own_gets_its_drop_in() -> None:
    """The folder of the unit `sdcpd@router` is that of no other instance."""
    lines = good("init", "router/r0=https://gpu1.lab:7442/", "drafter/d0=https://gpu1.lab:7444/")
    (copy,) = [line.split() for line in lines if line.startswith("  cp -r")]
    assert copy[2].endswith("/sdcpd@router.service.d")
    assert copy[3] == "/etc/systemd/system/sdcpd@router-r0.service.d"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_on_this_host_the_files_stay_where_they_are(host: str) -> None:
    printed = certs("init", "--trust-domain", "lab.example", f"drafter/d0=https://{host}:7444/")
    assert "scp" not in printed.stdout
    lines = tls_lines(printed.stdout)
    config = parse_config("\n".join(lines), name="printed")
    assert config.node.trust_domain == "lab.example"
    fill = Instance("drafter", "d0", "drafter-d0").fill
    identity = TlsIdentity(
        ca=fill(config.tls.ca), cert=fill(config.tls.cert), key=fill(config.tls.key)
    )
    assert f"https://{host}:7444/" in identity.uris
    assert "  start here: sdcpd --role drafter-d0 -c FILE" in printed.stdout


def test_an_operator_needs_no_unit() -> None:
    lines = good("init", "admin/alice")
    assert not any("systemctl" in line for line in lines)


# ---- issue, show, check


def test_issue_replaces_and_says_how_it_is_taken() -> None:
    good("init", *SPECS)
    old = Path("sdcpd-pki/verifier.v0.crt").read_bytes()
    lines = good("issue", SPECS[1], "--san", "10.0.0.9", "--san", "gpu1", "--days", "7")
    assert Path("sdcpd-pki/verifier.v0.crt").read_bytes() != old
    assert lines[-1].startswith("A running sdcpd takes them at: systemctl reload")
    shown = "\n".join(good("show", "sdcpd-pki/verifier.v0.crt"))
    for host in ("gpu1.lab", "10.0.0.9", "gpu1"):
        assert re.search(rf"host +{re.escape(host)}$", shown, re.MULTILINE)
    assert "(7 days left)" in shown


def test_issue_without_an_authority() -> None:
    result = certs("issue", SPECS[0])
    assert result.exit_code == 1
    assert result.stderr == (
        "sdcpd-pki/ca.crt does not exist; make an authority with: sdcpctl certs init\n"
    )


def test_issue_with_a_base_uri_that_is_none() -> None:
    good("init")
    result = certs("issue", "verifier/v0=http://gpu1:1/")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "must look like https://HOST:PORT" in result.stderr


def test_show_lists_the_authority_first() -> None:
    good("init", *SPECS)
    lines = good("show")
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == [f"sdcpd-pki/{n}.crt" for n in ("ca", "router.r0", "verifier.v0")]
    assert "  uri      spiffe://sdcp.internal/sdcp/router/r0" in lines
    assert "  uri      https://10.0.0.5:7442/" in lines
    assert "  issuer   sdcp.internal SDCP CA" in lines


def test_check_of_a_good_folder() -> None:
    good("init", *SPECS)
    lines = good("check")
    assert [line.split()[0] for line in lines] == ["ok"] * 3
    assert lines[1].split()[1:] == ["sdcpd-pki/router.r0.crt", "router/r0,", "90", "days", "left"]


def test_check_finds_every_fault_and_exits_1() -> None:
    good("init", *SPECS, "drafter/d0=https://gpu2.lab:7444/")
    Path("sdcpd-pki/router.r0.key").chmod(0o644)
    Path("sdcpd-pki/verifier.v0.key").unlink()
    create_authority("other", trust_domain="sdcp.internal")
    leaf = issue("other", role="drafter", name="d0", base_uri="https://gpu2.lab:7444/")
    leaf.crt_path.rename("sdcpd-pki/drafter.d0.crt")
    leaf.key_path.rename("sdcpd-pki/drafter.d0.key")
    result = certs("check")
    assert result.exit_code == 1
    failed = {line.split()[1]: line for line in result.stdout.splitlines() if "FAIL" in line}
    assert "chmod 0640 sdcpd-pki/router.r0.key" in failed["sdcpd-pki/router.r0.key"]
    assert "missing" in failed["sdcpd-pki/verifier.v0.key"]
    assert "not the authority of this folder" in failed["sdcpd-pki/drafter.d0.crt"]
    assert re.fullmatch(r"3 of \d+ failed\n", result.stderr)


def test_check_of_a_folder_without_certificates(tmp_path: Path) -> None:
    result = certs("check", str(tmp_path))
    assert (result.exit_code, result.stderr) == (1, f"{tmp_path} holds no certificate (*.crt)\n")


def test_a_folder_that_cannot_be_written() -> None:
    Path("file").write_text("")
    result = certs("init", "--out", "file/pki")
    assert result.exit_code == 1
    assert result.stderr.startswith("file/pki: ")


def test_renew_makes_the_same_certificates_again() -> None:
    """ux 4: names, hosts and roles stay; the authority does too."""
    good("init", "--trust-domain", "lab.example", *SPECS, "--san", "gpu1.other")
    before = {path: path.read_bytes() for path in Path("sdcpd-pki").iterdir()}
    shown = good("show", "sdcpd-pki")
    assert good("renew", "--if-needed") == ["nothing is due"]
    assert good("renew", "--if-needed", "verifier/v0") == ["nothing is due"]
    good("renew", "v0")
    after = {path: path.read_bytes() for path in Path("sdcpd-pki").iterdir()}
    changed = {path.name for path in after if after[path] != before[path]}
    assert changed == {"verifier.v0.crt", "verifier.v0.key"}
    again = [line for line in good("show", "sdcpd-pki") if "sha256" not in line]
    assert again == [line for line in shown if "sha256" not in line]
    good("renew")
    assert Path("sdcpd-pki/ca.crt").read_bytes() == before[Path("sdcpd-pki/ca.crt")]
    assert good("check", "sdcpd-pki")


def test_what_is_due_is_renewed() -> None:
    """Also when it has expired; a timer that finds nothing to do has not failed."""
    good("init", "--trust-domain", "lab.example")
    long_ago = datetime.now(UTC) - timedelta(days=80)
    for name in ("old", "older"):
        days = 90 if name == "old" else 30
        base = f"https://{name}.lab:7443/"
        issue("sdcpd-pki", role="verifier", name=name, base_uri=base, days=days, now=long_ago)
    good("issue", "verifier/new=https://new.lab:7443/")
    fresh = Path("sdcpd-pki/verifier.new.crt").read_bytes()
    lines = good("renew", "--if-needed")
    assert [line.split()[0] for line in lines[:2]] == ["verifier/old", "verifier/older"]
    assert Path("sdcpd-pki/verifier.new.crt").read_bytes() == fresh
    assert good("renew", "--if-needed") == ["nothing is due"]


@pytest.mark.parametrize("names", [["v9"], ["router/v0"], ["v0", "x"]])
def test_renewing_what_is_not_there(names: list[str]) -> None:
    good("init", "--trust-domain", "lab.example", *SPECS)
    result = certs("renew", *names)
    assert result.exit_code == 1
    assert "there are: router/r0, verifier/v0" in result.stderr
