"""The units: what they must say, and what systemd's own tools think of them."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from sdcpd.config import Config, RouterSection
from sdcpd.daemon import Instance

UNITS = Path(__file__).parents[1] / "systemd"
TEMPLATE = UNITS / "sdcpd@.service"
DROP_IN = UNITS / "sdcpd@router.service.d" / "10-nogpu.conf"


class _Unit(configparser.RawConfigParser):
    """A unit file; a key that stands several times is a list of lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",), dict_type=_Lists)
        self.optionxform = str  # type: ignore[assignment, method-assign]
        self.read_string(path.read_text())

    def all(self, section: str, key: str) -> list[str]:
        return self.get(section, key).split("\n")


class _Lists(dict[str, object]):
    """configparser reads each value as a list of its lines; ours go on."""

    def __setitem__(self, key: str, value: object) -> None:
        known = self.get(key)
        if isinstance(value, list) and isinstance(known, list):
            known.extend(value)
        else:
            super().__setitem__(key, value)


@pytest.fixture(scope="module")
def unit() -> _Unit:
    return _Unit(TEMPLATE)


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
def test_required_keys(unit: _Unit, section: str, key: str, value: str) -> None:
    assert unit.all(section, key) == [value]


def test_the_filter_begins_as_a_list_of_what_is_allowed(unit: _Unit) -> None:
    """A first line with ~ would make it a list of what is denied."""
    assert unit.all("Service", "SystemCallFilter") == ["@system-service", "~@privileged"]


def test_both_names_of_the_nvidia_device_group(unit: _Unit) -> None:
    allowed = unit.all("Service", "DeviceAllow")
    assert {"char-nvidia rw", "char-nvidia-frontend rw", "char-nvidia-uvm rw"} <= set(allowed)


@pytest.mark.parametrize(
    "key", ["MemoryDenyWriteExecute", "PrivateDevices", "ProcSubset", "ExecStartPre"]
)
def test_what_must_not_be_there(unit: _Unit, key: str) -> None:
    """torch needs the first three off; a failing ExecStartPre is restarted."""
    assert not unit.has_option("Service", key)


def test_the_router_needs_no_device_and_no_executable_memory() -> None:
    drop_in = _Unit(DROP_IN)
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


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units of three instances, with programs that exist."""
    program = tmp_path / "sdcpd"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = tmp_path / "units"
    shutil.copytree(UNITS, units)
    gpu = units / "sdcpd-gpu.service"
    gpu.write_text(gpu.read_text().replace("=/usr/bin/nvidia-modprobe -c", f"={program} -c"))
    text = TEMPLATE.read_text().replace("/usr/bin/sdcpd", str(program))
    for instance in ("router", "verifier", "drafter-d1"):
        (units / f"sdcpd@{instance}.service").write_text(text)
    return units


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=30
    )


def test_systemd_finds_no_fault(installed: Path) -> None:
    """Unknown keys alone do not fail the command: any word about ours does."""
    verify = tool("systemd-analyze"), "verify", "--man=no"
    services = sorted(installed.glob("sdcpd@?*.service"))
    done = run(*verify, *services, installed / "sdcpd.target", installed / "sdcpd-gpu.service")
    assert done.returncode == 0, done.stderr
    assert str(installed) not in done.stderr and "sdcpd" not in done.stderr


@pytest.mark.parametrize(
    ("instance", "exposure"), [("verifier", 20), ("drafter-d1", 20), ("router", 15)]
)
def test_exposure_stays_low(installed: Path, instance: str, exposure: int) -> None:
    """In tenths, where other servers of this kind are between 90 and 96."""
    security = tool("systemd-analyze"), "security", "--offline=true", "--no-pager"
    done = run(*security, f"--threshold={exposure}", installed / f"sdcpd@{instance}.service")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_user_and_directories_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    done = run(tool("systemd-sysusers"), f"--root={tmp_path}", UNITS / "sysusers.d" / "sdcpd.conf")
    assert done.returncode == 0, done.stderr
    assert ":/var/lib/sdcpd:" in (tmp_path / "etc" / "passwd").read_text()
    conf = UNITS / "tmpfiles.d" / "sdcpd.conf"
    done = run(tool("systemd-tmpfiles"), "--create", f"--root={tmp_path}", conf)
    if "Operation not permitted" in done.stderr:
        pytest.skip("changing owners needs root")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "etc" / "sdcpd" / "certs").stat().st_mode & 0o777 == 0o750
