"""`sdcpctl config` and `sdcpctl reload`, the latter against a real process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.__main__ import main
from sdcpd.config import Config, parse_config
from sdcpd.reload import RELOADABLE, Reloads, differences, flat
from tests.kit.by_hand import Sdcpd
from tests.kit.by_hand_site import make_site
from tests.test_config_sources import FILE
from tests.test_example import WHOLE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "sdcpd.toml"
    made.write_text(FILE)
    return made


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environ)


def test_show_tells_where_each_value_is_from(path: Path) -> None:
    """ux 3: as a file would have it, defaults too."""
    done = run(
        *("config", "show", "-c", str(path), "--origin", "-o", "json", "--set", "log.level=error"),
        SDCPD__VERIFIER__BATCH_ROWS="64",
    )
    assert done.exit_code == 0, done.output
    found = {one["key"]: (one["value"], one["origin"]) for one in json.loads(done.output)["values"]}
    assert found["verifier.round_rate"] == ("50/s", f"{path}:8")
    assert found["verifier.batch_rows"] == (64, "environment SDCPD__VERIFIER__BATCH_ROWS")
    assert found["log.level"] == ("error", "--set log.level")
    assert found["verifier.self_decode_after"] == ("500ms", "default")
    changed = run("config", "show", "-c", str(path), "--changed").output
    assert "node.trust_domain" in changed
    assert "batch_rows" not in changed


def test_check_tells_every_problem(path: Path) -> None:
    assert run("config", "check", "-c", str(path)).output == f"{path}: ok\n"
    path.write_text(FILE.replace('"50/s"', "50").replace("name =", "nam ="))
    done = run("config", "check", "-c", str(path))
    assert done.exit_code == 1
    assert f'{path}:2: unknown key "nam" in [node]; did you mean "name"?' in done.output
    assert "4 problems" in done.output
    assert run("config", "check", "-c", str(path / "no")).exit_code == 1


def test_the_schema_is_of_the_file(path: Path) -> None:
    """What is written in the example is what the schema allows; no default is of another kind."""
    schema = json.loads(run("config", "schema").output)
    assert schema["title"] == "sdcpd.toml"
    duration = schema["$defs"]["TlsSection"]["properties"]["warn_before"]
    assert (duration["type"], duration["default"]) == ("string", "14d")
    assert schema["$defs"]["ApiSection"]["properties"]["listen"]["default"] == "127.0.0.1:8000"
    assert set(schema["properties"]) == set(Config.model_fields)


def test_what_may_be_reloaded_exists() -> None:
    known = flat(parse_config(WHOLE, name="example"))
    assert not set(RELOADABLE) - known.keys()


def test_differences() -> None:
    old = parse_config(FILE, name="old")
    new = parse_config(FILE.replace('"50/s"', '"60/s"').replace('"n0"', '"n1"'), name="new")
    assert differences(old, new) == ["node.name", "verifier.round_rate"]
    assert differences(old, parse_config(FILE.replace('"50/s"', '"3000/min"'), name="same")) == []


def test_sections_that_come_or_go_need_a_restart() -> None:
    whole = parse_config(WHOLE, name="whole")
    less = parse_config(FILE, name="less")
    for running, new in ((whole, less), (less, whole)):
        reloads = Reloads(running, lambda new=new: new)  # type: ignore[misc]
        report = reloads.reload()
        assert not report.problems
        assert "api.cors_origins" in report.needs_restart
        assert all(key.split(".")[0] in ("verifier", "log") for key in report.changed)


@pytest.mark.slow
def test_a_running_instance_reloads(tmp_path: Path) -> None:
    """ux 3: what counts at once, what needs a restart, and a wrong file changes nothing."""
    site = make_site(tmp_path)
    file = site.config("router", *site.section("router", "router"))
    process = site.start("router-r0", config=file)
    try:
        process.wait_notified("READY=1")
        _reloads(file, process, f"unix:{site.router_socket}")
    finally:
        site.stop()


def _reloads(file: Path, process: Sdcpd, socket: str) -> None:
    whole = file.read_text()

    def ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli", *arguments, "--endpoint", socket]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)

    (tier,) = json.loads(ctl("cache", "tiers", "-o", "json").stdout)["tiers"]
    assert (tier["kind"], tier["size"]) == ("host", "256MiB")
    assert ctl("cache", "tiers").stdout.startswith("TIER  SIZE")
    assert ctl("cache", "ls").stdout == "nothing is kept\n"
    assert ctl("cache", "gc", "--yes").stdout == "0 objects deleted, 0B\n"
    assert ctl("config", "diff", "-c", str(file)).stdout == "no difference\n"
    file.write_text(_with(whole, router='m_max = 7\nswitch_grace = "5s"', log='level = "debug"'))
    done = ctl("config", "diff", "-c", str(file))
    assert done.returncode == 1
    assert [line.split()[::3] for line in done.stdout.splitlines()[1:]] == [
        ["log.level", "reload"],
        ["router.m_max", "reload"],
        ["router.switch_grace", "restart"],
    ]
    done = ctl("reload")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "changed: log.level",
        "changed: router.m_max",
        "needs restart: router.switch_grace",
    ]
    left = ctl("config", "diff", "-c", str(file)).stdout
    assert "switch_grace" in left
    assert "m_max" not in left
    file.write_text(_with(whole, router="m_max = 70"))
    done = ctl("reload")
    assert done.returncode == 1
    assert "m_max = 70: must be from 1 to 64" in done.stderr
    assert "the old configuration stays in use" in done.stderr
    process.process.send_signal(signal.SIGHUP)  # the same by systemctl reload
    process.wait_notified("RELOADING=1", count=3)
    process.wait_notified("READY=1", count=4)
    assert process.log.count("configuration not reloaded") == 2


def _with(whole: str, **sections: str) -> str:
    """A file with more keys in its sections."""
    for name, lines in sections.items():
        header = f"[{name}]\n"
        whole = (
            whole.replace(header, f"{header}{lines}\n")
            if header in whole
            else f"{whole}\n{header}{lines}\n"
        )
    return whole


def test_commands_about_a_running_instance_say_when_there_is_none(tmp_path: Path) -> None:
    endpoint = f"unix:{tmp_path}/none.sock"
    for arguments in (("reload",), ("config", "diff", "-c", str(_file(tmp_path)))):
        done = run(*arguments, "--endpoint", endpoint)
        assert done.exit_code == 3, done.output
        assert "Traceback" not in done.output


def _file(directory: Path) -> Path:
    made = directory / "f.toml"
    made.write_text(FILE)
    return made
