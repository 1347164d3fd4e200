"""The units: what they must say, and what systemd's own tools think of them."""

from __future__ import annotations

import re
import shutil
import stat
from pathlib import Path

import pytest

from sdcpd.config import Config
from sdcpd.config_sections import RouterSection
from sdcpd.daemon import Instance
from tests.kit.units import UNITS, UnitFile, furnish, program, run, tool

TEMPLATE = UNITS / "sdcpd@.service"
DROP_IN = UNITS / "sdcpd@router.service.d" / "10-nogpu.conf"


@pytest.fixture(scope="module")
def unit() -> UnitFile:
    return UnitFile(TEMPLATE)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("Unit", "PartOf", "sdcpd.target"),
        ("Service", "Type", "notify"),
        ("Service", "NotifyAccess", "main"),
        ("Service", "ExecStart", "/usr/bin/sdcpd --role %i"),
        ("Service", "ExecReload", "/bin/kill -HUP $MAINPID"),
        ("Service", "Restart", "on-failure"),
        ("Service", "RestartPreventExitStatus", "78"),
        ("Service", "KillMode", "mixed"),
        ("Service", "WatchdogSec", "30s"),
        ("Service", "User", "sdcpd"),
        ("Service", "UMask", "0077"),
        ("Service", "StateDirectory", "sdcpd/%i"),
        ("Service", "CacheDirectory", "sdcpd/%i"),
        ("Service", "RuntimeDirectory", "sdcpd/%i"),
        ("Service", "RuntimeDirectoryMode", "0750"),
        ("Service", "NoNewPrivileges", "yes"),
        ("Service", "ProtectSystem", "strict"),
        ("Service", "ProtectHome", "yes"),
        ("Service", "CapabilityBoundingSet", ""),
        ("Service", "DevicePolicy", "closed"),
        ("Install", "WantedBy", "sdcpd.target"),
    ],
)
def test_required_keys(unit: UnitFile, section: str, key: str, value: str) -> None:
    assert unit.all(section, key) == [value]


def test_the_filter_begins_as_a_list_of_what_is_allowed(unit: UnitFile) -> None:
    """A first line with ~ would make it a list of what is denied."""
    assert unit.all("Service", "SystemCallFilter") == ["@system-service", "~@privileged"]


def test_both_names_of_the_nvidia_device_group(unit: UnitFile) -> None:
    allowed = unit.all("Service", "DeviceAllow")
    assert {"char-nvidia rw", "char-nvidia-frontend rw", "char-nvidia-uvm rw"} <= set(allowed)


@pytest.mark.parametrize(
    "key", ["MemoryDenyWriteExecute", "PrivateDevices", "ProcSubset", "ExecStartPre"]
)
def test_what_must_not_be_there(unit: UnitFile, key: str) -> None:
    """torch needs the first three off; a failing ExecStartPre is restarted, whatever its status."""
    assert not unit.has_option("Service", key)


def test_the_router_needs_no_device_and_no_executable_memory() -> None:
    drop_in = UnitFile(DROP_IN)
    assert drop_in.all("Service", "DeviceAllow") == [""]
    for key in ("MemoryDenyWriteExecute", "PrivateDevices", "PrivateUsers"):
        assert drop_in.all("Service", key) == ["yes"]


@pytest.mark.parametrize("text", ["router", "drafter-d1"])
def test_default_paths_lie_in_the_directories_of_the_unit(text: str) -> None:
    """`%i` is the text of --role, which is `{instance}` in the configuration."""
    role, _, name = text.partition("-")
    instance = Instance(role, name or "host", text)
    config = Config(router=RouterSection(base_uri="https://a:1/"))
    assert instance.fill(config.admin.socket) == Path(f"/run/sdcpd/{text}/admin.sock")
    assert instance.fill(config.mlc.log_path) == Path(f"/var/lib/sdcpd/{text}/logs")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A root with the units where Debian has them, and with programs that do nothing."""
    root = furnish(tmp_path)
    units = root / "usr/lib/systemd/system"
    shutil.copytree(UNITS, units, dirs_exist_ok=True)
    program(root / "usr/bin/sdcpd")
    return root


def test_systemd_finds_no_fault(installed: Path) -> None:
    """Unknown keys alone do not fail the command: any word at all does."""
    verify = tool("systemd-analyze"), "verify", "--man=no", f"--root={installed}"
    instances = [f"sdcpd@{name}.service" for name in ("router", "verifier", "drafter-d1")]
    done = run(*verify, *instances, "sdcpd.target", "sdcpd-gpu.service")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_fault_would_be_found(installed: Path) -> None:
    unit = installed / "usr/lib/systemd/system/sdcpd@.service"
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    verify = tool("systemd-analyze"), "verify", "--man=no", f"--root={installed}"
    assert "ProtectHouse" in run(*verify, "sdcpd@router.service").stderr


@pytest.mark.parametrize(
    ("instance", "exposure"), [("verifier", 20), ("drafter-d1", 20), ("router", 15)]
)
def test_exposure_stays_low(installed: Path, instance: str, exposure: int) -> None:
    """In tenths, where other servers of this kind are between 90 and 96."""
    security = tool("systemd-analyze"), "security", "--offline=true", "--no-pager"
    unit = f"sdcpd@{instance}.service"
    done = run(*security, f"--root={installed}", f"--threshold={exposure}", unit)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert "Overall exposure level" in done.stdout


def test_every_unit_that_is_named_is_here_or_of_the_system() -> None:
    others = {"network-online.target", "multi-user.target", "nvidia-persistenced.service"}
    for path in (path for path in UNITS.rglob("*") if path.is_file()):
        if path.suffix in (".service", ".target"):
            named = set(re.findall(r"[\w@-]+\.(?:service|target)\b", _directives(path)))
            assert all((UNITS / name).is_file() for name in named - others), path


def _directives(path: Path) -> str:
    return "\n".join(line for line in path.read_text().split("\n") if not line.startswith("#"))


@pytest.fixture
def made(installed: Path) -> Path:
    """The root after systemd-sysusers and systemd-tmpfiles."""
    conf = UNITS / "sysusers.d" / "sdcpd.conf"
    done = run(tool("systemd-sysusers"), f"--root={installed}", conf)
    assert done.returncode == 0, done.stderr
    conf = UNITS / "tmpfiles.d" / "sdcpd.conf"
    done = run(tool("systemd-tmpfiles"), "--create", f"--root={installed}", conf)
    if "Operation not permitted" in done.stderr:
        pytest.skip("changing owners needs root")
    assert done.returncode == 0, done.stderr
    return installed


@pytest.mark.parametrize(
    ("path", "mode", "group"),
    [
        ("etc/sdcpd/certs", 0o750, "sdcpd"),
        ("etc/sdcpd/secrets", 0o700, "root"),
        ("etc/sdcpd/secrets/api-keys", 0o600, "root"),
    ],
)
def test_user_and_directories_are_made(made: Path, path: str, mode: int, group: str) -> None:
    users = (made / "etc/passwd").read_text()
    (entry,) = [line.split(":") for line in users.splitlines() if line.startswith("sdcpd:")]
    assert entry[5] == "/var/lib/sdcpd"
    found = (made / path).stat()
    assert stat.S_IMODE(found.st_mode) == mode
    assert found.st_uid == 0
    assert str(found.st_gid) == ("0" if group == "root" else entry[3])


def test_what_the_router_is_passed_is_there_from_the_start(made: Path) -> None:
    """A credential whose file is missing would keep the unit from starting."""
    (line,) = UnitFile(DROP_IN).all("Service", "LoadCredential")
    name, _, path = line.partition(":")
    assert name == "api-keys"
    assert (made / path.removeprefix("/")).read_bytes() == b""
    assert not UnitFile(TEMPLATE).has_option("Service", "LoadCredential")


def test_a_second_run_of_tmpfiles_keeps_the_keys(made: Path) -> None:
    (made / "etc/sdcpd/secrets/api-keys").write_text("ann:sha256:00\n")
    conf = UNITS / "tmpfiles.d" / "sdcpd.conf"
    assert run("systemd-tmpfiles", "--create", f"--root={made}", conf).returncode == 0
    assert (made / "etc/sdcpd/secrets/api-keys").read_text() == "ann:sha256:00\n"
