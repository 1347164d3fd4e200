"""sdcpctl doctor: each planted fault is found, and its cure named."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from certs import create_authority, issue
from cli.__main__ import main
from sdcpd.doctor.peers import cluster_findings, instance_findings
from tests.kit.by_hand_site import Site, make_site
from tests.kit.certs import CertKit


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return make_site(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def site(made: Site, tmp_path: Path) -> Site:
    """A copy, for each test plants something."""
    shutil.copytree(made.directory, tmp_path, dirs_exist_ok=True)
    tls = [line.replace(str(made.directory), str(tmp_path)) for line in made.tls]
    return Site(tmp_path, tmp_path / "target", made.ports, tls)


def config(site: Site, *more: str, role: str = "verifier") -> Path:
    section = site.section(role, role)
    at = section.index("[verifier.model]") if role == "verifier" else len(section)
    keys = [line for line in more if not line.startswith("[")]
    rest = [line for line in more if line.startswith("[")]
    model = [line for line in keys if line.split()[0] in ("device", "compile")]
    own = [line for line in keys if line not in model]
    return site.config(role, *section[:at], *own, *section[at:], *model, *rest)


def findings(path: Path, *options: str) -> list[tuple[str, str, str]]:
    role = {"verifier": "verifier-v0", "router": "router-r0", "drafter": "drafter-d0"}[path.stem]
    options += ("--role", role, "-o", "json")
    done = CliRunner().invoke(main, ["doctor", "-c", str(path), *options])
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)["findings"]
    assert all(one["text"] for one in found)
    return [(one["area"], one["level"], one["text"]) for one in found]


def bad(path: Path, area: str) -> list[str]:
    """What is wrong in one area."""
    return [f"{lv}: {text}" for a, lv, text in findings(path) if a == area and lv != "ok"]


def test_a_host_on_which_nothing_runs_yet(site: Site) -> None:
    found = findings(config(site))
    assert ("config", "ok") in {(area, level) for area, level, _ in found}
    wrong = {area for area, level, _ in found if level == "FAIL"}
    assert wrong == {"path"}, "its router is not started"
    (site.directory / "verifier-v0.sock").touch()
    assert bad(config(site), "running")[0].startswith("FAIL"), "it has died"
    texts = "\n".join(text for _, _, text in found)
    assert "Start it: systemctl start sdcpd@verifier-v0" in texts
    assert "Is the router running, and is the port open?" in texts
    assert "Move it to where certificates are made" in texts


def _key_open(site: Site) -> None:
    (site.pki / "verifier.v0.key").chmod(0o644)


def _expired(site: Site) -> None:
    base = site.base("verifier")
    ago = datetime.now(UTC) - timedelta(days=90)
    issue(site.pki, role="verifier", name="v0", base_uri=base, days=30, now=ago)


def _soon(site: Site) -> None:
    issue(site.pki, role="verifier", name="v0", base_uri=site.base("verifier"), days=2)


def _early(site: Site) -> None:
    base = site.base("verifier")
    later = datetime.now(UTC) + timedelta(days=2)
    issue(site.pki, role="verifier", name="v0", base_uri=base, now=later)


def _wrong_key(site: Site) -> None:
    shutil.copy(site.pki / "drafter.d0.key", site.pki / "verifier.v0.key")


def _other_authority(site: Site) -> None:
    other = site.directory / "other"
    create_authority(other, trust_domain="by.hand")
    shutil.copy(other / "ca.crt", site.pki / "ca.crt")


def _other_base(site: Site) -> None:
    issue(site.pki, role="verifier", name="v0", base_uri="https://gpu9.lab:7443/")


def _other_role(site: Site) -> None:
    for end in ("crt", "key"):
        shutil.copy(site.pki / f"drafter.d0.{end}", site.pki / f"verifier.v0.{end}")


def _missing(site: Site) -> None:
    (site.pki / "verifier.v0.crt").unlink()


@pytest.mark.parametrize(
    ("plant", "told", "cure"),
    [
        (_key_open, "FAIL: verifier", "chmod 0640"),
        (_expired, "expired 20", "sdcpctl certs issue"),
        (_soon, "WARN", "sdcpctl certs renew verifier/v0"),
        (_early, "is not valid before", "check the clock of this host"),
        (_wrong_key, "is not the key of", "install the two as a pair"),
        (_other_authority, "which is not in", "install the ca.crt that belongs to it"),
        (_other_base, "not its base_uri", "reissue it with sdcpctl certs issue"),
        (_other_role, "does not carry the role verifier", "issue one with sdcpctl certs issue"),
        (_missing, "cannot be read", "Put it there, or name another in [tls]"),
    ],
)
def test_certificates(site: Site, plant: Callable[[Site], None], told: str, cure: str) -> None:
    plant(site)
    wrong = [one for one in bad(config(site), "tls") if "ca.key" not in one]
    assert len(wrong) == 1
    assert told.lower() in wrong[0].lower()
    assert cure in wrong[0]


def test_the_file(site: Site) -> None:
    path = config(site, "max_sesions = 4", "batch_rows = 100")
    found = bad(path, "config")
    assert len(found) == 2
    assert 'did you mean "max_sessions"?' in found[0]
    assert "must be a multiple of 16" in found[1]


def test_a_model_directory_that_is_not_whole(site: Site) -> None:
    (site.model / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in bad(config(site), "model")[0]
    (router,) = bad(config(site, role="router"), "model")
    assert "expected a Hugging Face directory" in router


def test_devices(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bad(config(site, 'device = "cuda"'), "gpu")
    assert "there is no /dev/nvidiactl" in found[0]
    assert "nvidia-modprobe" in found[0]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (found,) = [one for one in bad(config(site, "compile = true"), "gpu") if "compiler" in one]
    assert "Install g++, or set compile = false" in found


def test_disks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.directory / "file").write_text("")
    path = config(site, role="router")
    path.write_text(path.read_text().replace("router.logs", "file/logs"))
    (found,) = bad(path, "disk")
    assert "cannot be written" in found
    assert "chown" in found
    usage = shutil.disk_usage(site.directory)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (found,) = bad(config(site, role="router"), "disk")
    assert found.startswith("warn: mlc.log_path")
    assert "1MiB free.  Make room" in found


def test_keys(site: Site) -> None:
    keys = site.directory / "keys"
    path = config(site, f'[api]\nlisten = "127.0.0.1:0"\nkeys_file = "{keys}"', role="router")
    assert f"sdcpctl keys add NAME --file {keys}" in bad(path, "api")[0]
    keys.write_text("bob\n")
    assert "keys:1: expected name:sha256:hex" in bad(path, "api")[0]
    keys.write_text("")
    keys.chmod(0o644)
    assert "chmod 0640" in bad(path, "api")[0]


def test_ports(site: Site) -> None:
    with socket.create_server(("127.0.0.1", site.ports["verifier"])):
        (found,) = bad(config(site), "ports")
    assert f"ss -ltnp 'sport = :{site.ports['verifier']}'" in found
    assert not bad(config(site), "ports")


def test_limits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    path = config(site, '[mlc]\ntiers = [{ kind = "pinned", size = "64MiB" }]', role="drafter")
    text = path.read_text().replace("[mlc]\nlog_path", "[mlc]\n#log_path").replace("[mlc]\n#", "#")
    path.write_text(text.replace('log_size = "64MiB"\n', "", 1))
    found = "\n".join(bad(path, "limits"))
    assert "ulimit -n 65536" in found
    assert "ulimit -l unlimited" in found


def test_a_router_that_is_something_else(site: Site) -> None:
    """It accepts, and says nothing that TLS would."""
    with socket.create_server(("127.0.0.1", site.ports["router"])) as other:
        answering = threading.Thread(target=_hang_up, args=(other,))
        answering.start()
        (found,) = bad(config(site), "path")
        answering.join()
    assert "On its host: sdcpctl doctor" in found


def _hang_up(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.close()


def instance(role: str, state: str = "ready", **more: Any) -> dict[str, Any]:
    name = more.pop("name", f"{role[0]}0.abc")
    base = {"instance": name, "role": role, "base_uri": "https://x:1/", "state": state}
    return base | {"load": 1, "seen_s": 0.2, "accept": None, "engine": "e1"} | more


@pytest.mark.parametrize(
    ("instances", "told", "cure"),
    [
        ([instance("drafter")], "FAIL: no verifier is ready", "journalctl -u 'sdcpd@verifier*'"),
        ([instance("verifier")], "warn: no drafter is ready", "journalctl -u 'sdcpd@drafter*'"),
        ([instance("verifier", "expired")], "no status for 0.2 s", "journalctl"),
        ([instance("verifier", "stuck")], "its engine does not go on", "journalctl"),
        ([instance("verifier", "draining")], "is drained", "instances undrain v0.abc"),
        (
            [instance("drafter") | {"certificate_left_s": 5 * 86400}],
            "its certificate expires in 5d",
            "sdcpctl certs renew drafter/",
        ),
        ([instance("drafter", accept=0.1)], "10% of its tokens are accepted", "sessions watch"),
        (
            [instance("verifier"), instance("verifier", name="v1.x", engine="e2")],
            "in 2 different ways",
            "instances list -o wide",
        ),
    ],
)
def test_what_a_router_sees(instances: list[dict[str, Any]], told: str, cure: str) -> None:
    found = [f"{one.level}: {one.text}" for one in cluster_findings({"instances": instances})]
    assert any(told in one and cure in one for one in found), found


def test_a_cluster_in_which_all_is_well() -> None:
    found = list(cluster_findings({"instances": [instance("verifier"), instance("drafter")]}))
    assert {one.level for one in found} == {"ok"}
    well = {"reasons": [], "degraded": [], "version": "1"}
    assert [one.level for one in instance_findings("router r0", well)] == ["ok"]
    ill = {"reasons": ["the log is full"], "degraded": ["a tier"], "version": "1"}
    assert [one.level for one in instance_findings("router r0", ill)] == ["FAIL", "warn"]


def test_exit_codes_and_the_table(site: Site) -> None:
    done = CliRunner().invoke(main, ["doctor", "-c", str(config(site))])
    assert done.exit_code == 1
    assert done.stderr.strip().endswith("failed")
    assert (
        CliRunner().invoke(main, ["doctor", "-c", str(config(site)), "--role", "x"]).exit_code == 2
    )


def test_the_certificate_of_the_api_is_looked_at(site: Site) -> None:
    """[api.tls]: one that is there, one that expires soon, and none."""
    kit = CertKit(site.directory / "api-pki")
    good, soon = kit.leaf(), kit.leaf("verifier", "soon", days=3)
    for leaf, level, text in (
        (good, "ok", "left"),
        (soon, "warn", "Renew it"),
        (None, "FAIL", "cannot be read"),
    ):
        cert = leaf.crt_path if leaf else site.directory / "none.crt"
        key = leaf.key_path if leaf else site.directory / "none.key"
        lines = f'[api]\nlisten = "127.0.0.1:0"\n[api.tls]\ncert = "{cert}"\nkey = "{key}"'
        found = findings(config(site, lines, role="router"))
        (one,) = [one for one in found if "[api.tls]" in one[2]]
        assert one[:2] == ("api", level) and text in one[2]
