"""File, conf.d, environment and command line: who wins, and which place a mistake is told at."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sdcpd.__main__ import main as sdcpd_main
from sdcpd.config import Config, ConfigError, config_of, load_config, parse_config
from sdcpd.config_sources import read_sources
from tests.test_example import WHOLE

FILE = """\
[node]
name = "n0"
trust_domain = "lab.example"
[verifier]
base_uri = "https://127.0.0.1:7443/"
router = "https://127.0.0.1:7442/"
max_sessions = 8
round_rate = "50/s"
[verifier.model]
path = "/srv/target"
[[peers]]
name = "a"
[[peers]]
name = "b"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "sdcpd.toml"
    made.write_text(FILE)
    return made


def more(path: Path, name: str, text: str) -> Path:
    (path.parent / "conf.d").mkdir(exist_ok=True)
    made = path.parent / "conf.d" / name
    made.write_text(text)
    return made


def problems(path: Path, **options: object) -> list[str]:
    with pytest.raises(ConfigError) as e:
        load_config(path, **options)  # type: ignore[arg-type]
    return e.value.problems


def test_flag_over_environment_over_file_over_default(path: Path) -> None:
    """ux 3: each value with its origin."""
    more(path, "10-a.toml", '[verifier]\nmax_sessions = 9\n[log]\nlevel = "debug"\n')
    more(path, "20-b.toml", "[verifier]\nmax_sessions = 10\n")
    environ = {"SDCPD__VERIFIER__MAX_SESSIONS": "11", "SDCPD__VERIFIER__ROUND_RATE": "60/s"}
    settings = ("verifier.max_sessions=12",)
    steps: list[tuple[dict[str, str], tuple[str, ...], int, str]] = [
        ({}, (), 10, "20-b.toml:2"),
        (environ, (), 11, "environment SDCPD__VERIFIER__MAX_SESSIONS"),
        (environ, settings, 12, "--set verifier.max_sessions"),
    ]
    for env, given, expected, where in steps:
        sources = read_sources(path, environ=env, settings=given)
        config = config_of(sources)
        assert config.verifier is not None
        assert config.verifier.max_sessions == expected
        assert (sources.origin(("verifier", "max_sessions")) or "").endswith(where)
        assert config.log.level == "debug"
        assert config.verifier.round_rate == (60 if env else 50)
        assert (sources.origin(("node", "name")) or "").endswith("sdcpd.toml:2")
        assert sources.origin(("verifier", "batch_rows")) is None


def test_without_an_environment_no_variable_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDCPD__NODE__NAME", "other")
    assert load_config(path).node.name == "n0"


def test_peers_of_all_files_add_up(path: Path) -> None:
    more(path, "x.toml", '[[peers]]\nname = "c"\n\n[[peers]]\nname = "d"\nroles = ["king"]\n')
    (problem,) = problems(path)
    assert "conf.d/x.toml:6: peers.3.roles.0" in problem
    more(path, "x.toml", '[[peers]]\nname = "c"\n')
    assert [peer.name for peer in load_config(path).peers] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("SDCPD__VERIFIER__MAX_SESSIONS", "0", "verifier.max_sessions = 0: must be from 1 to"),
        ("SDCPD__VERIFIER__MAX_SESIONS", "4", 'did you mean "max_sessions"?'),
        ("SDCPD__VERIFIER", "4", "must be a section"),
        ("SDCPD__", "4", 'unknown key ""'),
        ("SDCPD__VERIFIER__ROUND_RATE", "4", 'needs a unit, for example "200/s"'),
        ("SDCPD__ROUTER__M_MAX", "4", 'key "base_uri" is missing in [router]'),
        ("SDCPD__VERIFIER__ENFORCING_LOGS", "maybe", "must be true or false"),
    ],
)
def test_mistakes_in_the_environment(path: Path, variable: str, value: str, expected: str) -> None:
    found = problems(path, environ={variable: value})
    assert any(f"environment {variable}: " in one and expected in one for one in found)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("verifier.max_sessions", "write it as section.key=value"),
        ("=4", "write it as section.key=value"),
        ("verifier..x=4", "write it as section.key=value"),
        ("node.nam=x", 'did you mean "name"?'),
        ("node.name=a b", "may hold only letters"),
    ],
)
def test_mistakes_on_the_command_line(path: Path, setting: str, expected: str) -> None:
    assert any("--set " in one and expected in one for one in problems(path, settings=(setting,)))


def test_all_mistakes_of_all_files_at_once(path: Path) -> None:
    """ux 3: every problem, each at its place; files that are no TOML first."""
    path.write_text(FILE.replace("max_sessions = 8", "max_sessions = 0"))
    more(path, "1.toml", "[log]\nlevel = 5\n")
    found = problems(path, settings=("node.name=-",))
    assert [one.split(": ")[0].rsplit("/", 1)[-1] for one in found] == [
        "1.toml:2",
        "sdcpd.toml:7",
        "--set node.name",
    ]
    more(path, "2.toml", "nonsense")
    more(path, "3.toml", "[x")
    assert len(problems(path)) == 2


def test_values_are_as_a_file_has_them(path: Path) -> None:
    settings = (
        'tls.warn_before="1h"',
        "node.name=n1",
        "mlc.bases=['https://a:1/']",
        'log.level = "error"',
        "transport.http3=false",
    )
    config = load_config(path, settings=settings)
    assert config.tls.warn_before == 3600
    assert (config.node.name, config.log.level, config.transport.http3) == ("n1", "error", False)
    assert config.mlc.bases == ["https://a:1/"]


def test_what_is_written_is_what_was_read() -> None:
    """Every kind of value can be shown as a file would have it."""
    config = parse_config(WHOLE, name="example")
    assert Config.model_validate(config.model_dump(mode="json")) == config


ROUTER = """\
[router]
base_uri = "https://127.0.0.1:7442/"
model = "/srv/target"
"""
OPEN = '[api]\nlisten = "0.0.0.0:8000"\n'


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    """What systemd's $CREDENTIALS_DIRECTORY is, with an API key in it."""
    made = tmp_path / "credentials"
    made.mkdir()
    (made / "api-keys").write_text(f"ann:sha256:{'00' * 32}\n")
    return made


@pytest.mark.parametrize("written", ["", 'keys_file = ""\n'])
def test_keys_that_systemd_passes_are_taken(path: Path, credentials: Path, written: str) -> None:
    """They make a listener that others reach allowed, as a file that is named would."""
    path.write_text(f"{ROUTER}{OPEN}{written}")
    environ = {"CREDENTIALS_DIRECTORY": str(credentials)}
    config = load_config(path, environ=environ)
    assert config.api is not None and config.api.keys_file == credentials / "api-keys"
    origin = read_sources(path, environ=environ).origin(("api", "keys_file"))
    assert origin == "credential api-keys"


def test_a_file_that_is_named_goes_before_what_systemd_passes(
    path: Path, credentials: Path
) -> None:
    path.write_text(f'{ROUTER}{OPEN}keys_file = "/srv/keys"\n')
    environ = {"CREDENTIALS_DIRECTORY": str(credentials)}
    config = load_config(path, environ=environ)
    assert config.api is not None and config.api.keys_file == Path("/srv/keys")


def test_no_keys_are_taken_from_an_empty_credential(path: Path, credentials: Path) -> None:
    """It lies there from the installation on, and stands for none: the listener is still refused."""
    (credentials / "api-keys").write_text("")
    path.write_text(f"{ROUTER}{OPEN}")
    environ = {"CREDENTIALS_DIRECTORY": str(credentials)}
    assert "no key is asked for" in problems(path, environ=environ)[0]
    (credentials / "api-keys").unlink()
    assert "no key is asked for" in problems(path, environ=environ)[0]


def test_a_credential_opens_no_api(path: Path, credentials: Path) -> None:
    environ = {"CREDENTIALS_DIRECTORY": str(credentials)}
    assert load_config(path, environ=environ).api is None


def test_the_daemon_prints_what_it_goes_by(path: Path) -> None:
    """--print-config: each key with its value, as a file could have it."""
    path.write_text(ROUTER)
    command = ["--print-config", "-c", str(path), "--set", "log.level=debug"]
    done = CliRunner().invoke(sdcpd_main, command)
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and 'log.level = "debug"' in lines
    assert 'tls.warn_before = "14d"' in lines and "transport.http3 = true" in lines
