"""Every mistake in a configuration file is told at once: its line, its key, and what to write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sdcpd.check import problems_of as check_of
from sdcpd.config import Config, ConfigError, load_config, parse_config
from sdcpd.config_places import place_problems
from sdcpd.daemon import Daemon, Instance, StartError
from sdcpd.settings import router_config

GOOD = """\
[node]
name = "n0"
[router]
base_uri = "https://127.0.0.1:7442/"
model = "/srv/target"
[verifier]
base_uri = "https://127.0.0.1:7443/"
router = "https://127.0.0.1:7442/"
[verifier.model]
path = "/srv/target"
[drafter]
base_uri = "https://127.0.0.1:7444/"
router = "https://127.0.0.1:7442/"
kind = "ngram"
[[peers]]
id = "spiffe://a.example/x"
[[peers]]
id = "spiffe://a.example/y"
[api]
"""


LMDB = '{ kind = "lmdb", size = "1GiB", path = "%s" }'


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, name="f.toml")
    for problem in caught.value.problems:
        assert "\n" not in problem
        assert problem.startswith("f.toml:")
    return caught.value.problems


def with_key(section: str, line: str) -> tuple[str, int]:
    """GOOD with a line below a section's header, and the number of that line."""
    lines = GOOD.split("\n")
    at = lines.index(f"[{section}]") + 1 if f"[{section}]" in lines else None
    if at is None:
        lines += [f"[{section}]"]
        at = len(lines)
    key = line.split(" =")[0]
    for i in range(at, len(lines)):
        if lines[i].startswith("["):
            break
        if lines[i].startswith(f"{key} ="):
            del lines[i]
            break
    lines.insert(at, line)
    return "\n".join(lines), at + 1


def test_a_good_file() -> None:
    config = parse_config(GOOD, name="f.toml")
    assert config.verifier is not None and config.verifier.listen == ("0.0.0.0", 7443)
    assert config.instance_name(None) == "n0"
    assert config.instance_name("v7") == "v7"


def test_how_soon_a_verifier_counts_as_lost() -> None:
    """D-F1: three attempts over two seconds, unless the operator says otherwise."""
    for line, retry_s in (("", 2 / 3), ('failover_after = "600ms"', 0.2)):
        config = parse_config(GOOD.replace("[router]", f"[router]\n{line}"), name="f.toml")
        machine = router_config(config, tokenizer=bytes(32)).machine
        assert machine.retry_s == pytest.approx(retry_s)


def test_an_empty_file_has_every_default() -> None:
    assert parse_config("", name="f.toml") == Config()


@pytest.mark.parametrize(
    ("section", "line", "says"),
    [
        ("router", "m_max = 80", 'router.m_max = 80: must be from 1 to 64'),
        ("router", "m_max = 0", 'router.m_max = 0: must be from 1 to 64'),
        ("router", 'm_max = "many"', 'router.m_max = "many": must be a whole number'),
        ("router", "m_max = 1.5", "router.m_max = 1.5: must be a whole number"),
        ("router", "self_max = -1", "router.self_max = -1: must be at least 0"),
        ("router", 'sampling_rule = "best"', 'must be "auto", "race" or "rejection"'),
        ("router", "low_ratio = 20", 'router.low_ratio = 20: needs a unit, for example "70%"'),
        ("router", 'low_ratio = "120%"', "must be a whole percentage from 0% to 100%"),
        ("router", "fallback = []", "must be a list of reduce, switch, self_decode, fail"),
        ("router", 'fallback = ["run"]', '"run" is none of reduce, switch, self_decode, fail'),
        ("router", 'listen = "7442"', 'must be an address such as "0.0.0.0:7443"'),
        ("router", 'listen = "0.0.0.0:99999"', 'must be an address such as "0.0.0.0:7443"'),
        ("router", 'base_uri = "http://a:1/"', 'must be a base URI such as "https://gpu1.lab:7443/"'),
        ("verifier", "output_wait = 10", 'verifier.output_wait = 10: needs a unit, for example "3s"'),
        ("verifier", 'output_wait = "ten"', 'must be a number with a unit (ms, s, min, h, d), as in "3s"'),
        ("verifier", 'output_wait = "0s"', "must be more than 0"),
        ("verifier", 'engine_silence = "1s"', "must be at least 2s: an engine that is idle"),
        ("drafter", 'engine_silence = "0s"', "must be more than 0"),
        ("verifier", 'self_decode_after = "soon"', 'must be a number with a unit'),
        ("verifier", 'round_rate = "200"', 'must be a number with a unit (/s, /min), as in "200/s"'),
        ("verifier", "batch_rows = 100", "verifier.batch_rows = 100: must be a multiple of 16"),
        ("verifier", 'enforcing_logs = "perhaps"', "must be true or false"),
        ("verifier.model", "kv_memory = 2", 'needs a unit, for example "8GiB"'),
        ("verifier.model", 'digest = "abc"', 'must be "sha256:" and 64 hexadecimal digits'),
        ("verifier.model", 'device = "gpu0"', 'must be "auto", "cpu", "cuda" or "cuda:0"'),
        ("verifier.model", 'dtype = "int4"', 'must be "auto", "float32", "bfloat16" or "float16"'),
        ("verifier.model", "path = 3", "must be a path in quotes"),
        ("drafter", 'm = "some"', 'must be "auto" or a number from 1 to 64'),
        ("drafter", 'predraft = "yes"', 'must be "auto", true or false'),
        ("drafter", 'kind = "medusa"', 'must be "model" or "ngram"'),
        ("node", 'name = "a b"', 'may hold only letters, digits, dot, dash and underscore'),
        ("node", 'trust_domain = "Lab"', 'may hold only a-z, 0-9, dot, dash and underscore'),
        ("tls", 'cert = "/c/{rôle}.crt"', "may hold {role}, {name} and {instance}"),
        ("tls", 'key = "/c/{.key"', "may hold {role}, {name} and {instance}"),
        ("admin", "socket = 5", "must be a path in quotes"),
        ("mlc", 'tiers = [{ kind = "host" }]', 'key "size" is missing in [mlc.tiers.0]; add size = "1GiB"'),
        ("mlc", 'tiers = "host"', "must be a list, in [ ]"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "1GiB" }]', "an lmdb tier needs a path"),
        ("mlc", 'commit_log = "redis"', 'must be "lmdb" or "etcd"'),
        ("mlc", 'commit_log = "etcd"', 'mlc.etcd.endpoints is missing; mlc.commit_log = "etcd" needs the members'),
        ("mlc.etcd", 'endpoints = ["etcd1"]', 'must be host and port, as in "etcd1.lab:2379"'),
        ("mlc.etcd", 'endpoints = ["etcd1:0"]', 'must be host and port, as in "etcd1.lab:2379"'),
        ("mlc.etcd", 'endpoints = ["https://etcd1:2379"]', 'host and port without a scheme'),
        ("mlc.etcd", 'endpoints = "etcd1:2379"', 'must be a list, in [ ]'),
        ("mlc.etcd", 'prefix = "logs/"', 'ends with no slash, as in "sdcpd/logs"'),
        ("mlc.etcd", 'prefix = ""', 'may hold 1 to 128 letters'),
        ("mlc.etcd", 'timeout = "0s"', 'must be more than 0'),
        ("mlc.etcd", 'ca = 3', 'must be a path in quotes'),
        ("mlc", 'log_retention = "0s"', 'must be more than 0'),
        ("mlc", 'log_retention = 60', 'needs a unit, for example "3s"'),
        ("mlc.etcd", 'user = "u"', 'mlc.etcd.user is of no use without mlc.etcd.password_file; set that as well'),
        ("mlc.etcd", 'password_file = "/p"', 'mlc.etcd.password_file is of no use without mlc.etcd.user'),
        ("mlc.etcd", 'cert = "/c.crt"', 'mlc.etcd.cert is of no use without mlc.etcd.key and mlc.etcd.ca; set that as well'),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB" }, { kind = "s3", size = "1GiB" }]', "an s3 tier needs a bucket that exists"),
        ("mlc", 'tiers = [{ kind = "s3", size = "1GiB", bucket = "abc" }, { kind = "host", size = "1GiB" }]', "put its entry last"),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB" }, { kind = "s3", size = "1GiB", bucket = "abc", path = "/c" }]', "an s3 tier has no path"),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB" }, { kind = "s3", size = "1GiB", bucket = "abc", access_key_id_file = "/k" }]', "belong together"),
        ("mlc", 'tiers = [{ kind = "s3", size = "1GiB", bucket = "abc" }]', "put an entry before it"),
        ("mlc", 'tiers = [{ kind = "remote", base = "https://c.lab:7442/" }]', "put an entry before it"),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB" }, { kind = "remote" }]', "needs the base_uri"),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB" }, { kind = "remote", base = "https://c.lab:7442/", size = "1GiB" }]', "a remote tier has no size"),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB", base = "https://c.lab:7442/" }]', 'base is of a tier of kind = "remote"'),
        ("mlc", 'tiers = [{ kind = "s3", size = "1GiB", bucket = "A b" }]', 'must be the name of a bucket, as in "sdcpd-cache"'),
        ("mlc", 'tiers = [{ kind = "s3", size = "1GiB", bucket = "abc", prefix = "../x" }]', "may hold letters, digits"),
        ("mlc", 'tiers = [{ kind = "s3", size = "1GiB", bucket = "abc", region = "a b" }]', "must be the name of a region"),
        ("mlc", 'tiers = [{ kind = "host", size = "1GiB", bucket = "abc" }]', 'bucket is of a tier of kind = "s3"'),
        ("mlc", 'bases = ["gpu1"]', 'must be a base URI'),
        ("api", "cors_origins = [1]", "must be text in quotes"),
        ("api", 'listen = "0.0.0.0:8000"', "api.listen is open to the network and no key is asked for; set api.keys_file"),
        ("mlc", 'log_retention = "4000d"', "must be at most 3650d"),
        ("mlc", f'log_retention = "{400 * "9"}d"', "must be at most 3650d"),
        ("mlc", f'object_max = "{400 * "9"}B"', "must be at most 1024TiB"),
        ("mlc", 'object_max = "1B"', "must be at least 64KiB"),
        ("mlc", 'log_size = "1B"', "must be at least 1MiB"),
        ("mlc", 'scope_max = "0%"', "must be at least 1%"),
        ("mlc", 'local_dir = "/a\\u0000"', "holds a NUL character"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "1GiB", path = "/a\\u0000b" }]', "holds a NUL character"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "1GiB", path = "/{role[a]}" }]', "may hold {role}, {name} and {instance}"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "1GiB", path = "/{role:>9000000000000000000}" }]', "and no other braces"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "1GiB", path = "/{role.__class__}" }]', "and no other braces"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "900000000TiB", path = "/x" }]', "must be at most 1024TiB"),
        ("mlc", f'tiers = [{{ kind = "host", size = "{400 * "9"}TiB" }}]', "must be at most 1024TiB"),
        ("mlc", 'tiers = [{ size = "1GiB" }]', 'add kind = "pinned", "host", "lmdb", "remote" or "s3"'),
        ("mlc", "tiers = []", "mlc.tiers is empty: give at least"),
        ("mlc", 'tiers = [{ kind = "pinned", size = "1KiB" }]', "mlc.tiers[0].size is 1024 octets: must be at least 64KiB"),
        ("mlc", 'tiers = [{ kind = "lmdb", size = "17TiB", path = "/x" }]', "must be at most 16TiB"),
        ("mlc", 'log_size = "17TiB"', "must be at most 16TiB"),
        ("mlc", f"tiers = [{LMDB % '/a/{name}'}, {LMDB % '/a/b/../{name}'}]", "mlc.tiers[0] and [1] have the same path"),
        ("mlc", f"tiers = [{LMDB % '/var/lib/sdcpd/{instance}/logs'}]", "are one directory, or one holds the other"),
        ("mlc", f"tiers = [{LMDB % '/var/lib/sdcpd/{instance}/logs/mlc'}]", "give the tier a directory elsewhere"),
        ("mlc", f"tiers = [{LMDB % '/var/lib/sdcpd'}]", "give the tier a directory elsewhere"),
        ("mlc.etcd", f'timeout = "{320 * "9"}s"', "must be at most 3650d"),
        ("mlc.etcd", 'password_file = "/a\\u0000"', "holds a NUL character"),
        ("verifier.model", 'path = "/a\\u0000"', "holds a NUL character"),
        ("verifier", f'round_rate = "{400 * "9"}/s"', "must be at most 1000000/s"),
        ("router", f"m_max = 0x{5000 * '9'}", "must be"),
        ("router", f"listen = 0x{5000 * '9'}", "must be an address"),
        ("router", "fallback = [[]]", "what is no text is none of reduce"),
        ("router", 'fallback = ["a\\nb"]', '"a\\nb" is none of reduce'),
        ("log", 'level = "loud"', 'must be "debug", "info", "warning" or "error"'),
    ],
)  # fmt: skip
def test_a_bad_value_has_its_line_and_what_to_write(section: str, line: str, says: str) -> None:
    text, number = with_key(section, line)
    (problem,) = problems_of(text)
    assert problem.startswith(f"f.toml:{number}: ")
    assert line.split(" =")[0] in problem
    assert says in problem


@pytest.mark.parametrize(
    ("section", "line", "says"),
    [
        ("verifier", 'batch_row = 5', 'unknown key "batch_row" in [verifier]; did you mean "batch_rows"?'),
        ("tls", 'certificate = "x"', 'unknown key "certificate" in [tls]'),
        ("node", 'zzz = "x"', 'unknown key "zzz" in [node]; known are name, trust_domain'),
        ("node", '"²" = 1', 'unknown key "\\u00b2" in [node]; known are name, trust_domain'),
        ("verfier", 'x = 1', 'unknown section [verfier] in the file; did you mean "verifier"?'),
        ("verifier.modl", 'x = 1', 'unknown section [modl] in [verifier]; did you mean "model"?'),
    ],
)  # fmt: skip
def test_an_unknown_key_suggests_the_known_one(section: str, line: str, says: str) -> None:
    text, number = with_key(section, line)
    (problem,) = problems_of(text)
    header = "section" in says
    assert problem.startswith(f"f.toml:{number - header}: ")
    assert says in problem


def test_the_same_key_in_two_peers_has_the_line_of_its_own() -> None:
    text = GOOD.replace('id = "spiffe://a.example/y"', 'id = "y"\nroles = ["cook"]')
    (problem,) = problems_of(text)
    assert problem.startswith("f.toml:19: peers.1.roles.0")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("router.m_max = 99\nrouter.base_uri = 'https://a:1/'\nrouter.model = 'x'", 1),
        ('[node]\n"name" = "a/b"', 2),
        ("node = { name = 'a/b' }", 1),
        ("x = '''\ny = 1\n'''\n[node]\nname = 'a/b'", 5),
    ],
)
def test_lines_of_other_spellings(text: str, line: int) -> None:
    assert f"f.toml:{line}: " in problems_of(text)[-1]


def test_missing_keys_say_what_to_add() -> None:
    assert problems_of("[verifier]\n[verifier.model]\npath = 'x'\n") == [
        'f.toml:1: key "base_uri" is missing in [verifier]; '
        'add base_uri = "https://HOST:PORT/", what peers call this instance',
        'f.toml:1: key "router" is missing in [verifier]; '
        'add router = "https://HOST:7442/", the router\'s base_uri',
    ]


def test_a_missing_model_says_what_to_add() -> None:
    text = GOOD.replace('[verifier.model]\npath = "/srv/target"\n', "")
    text = text.replace('kind = "ngram"\n', "").replace('model = "/srv/target"\n', "")
    router, verifier, drafter = problems_of(text)
    assert "router.model is missing; set it to a directory" in router
    assert 'add [verifier.model] with path = "DIRECTORY"' in verifier
    assert 'or set kind = "ngram", which needs no model' in drafter


def test_reports_must_outlive_their_interval() -> None:
    text, number = with_key("drafter", 'status_ttl = "1s"')
    assert problems_of(text)[0].startswith(f"f.toml:{number}: drafter.status_ttl must be longer")


def test_one_bracket_where_two_belong() -> None:
    (problem,) = problems_of("[peers]\nid = 'x'\n")
    assert problem == "f.toml:1: peers: head each entry with [[peers]]"


def test_a_key_where_a_section_belongs() -> None:
    (problem,) = problems_of("tls = 'none'\n")
    assert problem.startswith('f.toml:1: tls = "none": must be a section: a line [tls]')


def test_all_problems_come_at_once_in_the_order_of_lines() -> None:
    text = GOOD.replace('name = "n0"', "nam = 0").replace('kind = "ngram"', "kind = 7")
    text = text.replace("[api]", "[api]\nsse_ping = 3\nmax_queue = 0")
    numbers = [int(problem.split(":")[1]) for problem in problems_of(text)]
    assert numbers == [2, 14, 20, 21]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[node]\nname = n0\n", "f.toml:2: not valid TOML: Invalid value"),
        ("[node]\nname = n0\n", "text, durations and sizes stand in quotes"),
        ("[node]\nname = 'a'\nname = 'b'\n", "f.toml:3: not valid TOML: Cannot overwrite"),
        ("[node]\nname = 'a'\nname = 'b'", "f.toml:3: "),
        ("[node]\n[tls]\n[node]\n", "f.toml:3: not valid TOML: Cannot declare"),
        ("[node]\nname = 'a\n", "close the quotes on the same line"),
        ("[node]\nname 'a'\n", "f.toml:2: not valid TOML: Expected '='"),
        ("[node\n", "f.toml:1: "),
    ],
)
def test_what_is_no_toml_has_its_line(text: str, says: str) -> None:
    (problem,) = problems_of(text)
    assert says in problem


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3000 * "[" + 3000 * "]", "lists or tables nest too deeply"),
        (3000 * "{a=" + "1" + 3000 * "}", "lists or tables nest too deeply"),
        (5000 * "9", "a number has too many digits"),
    ],
)
def test_what_cannot_be_read_has_its_line(value: str, says: str) -> None:
    (problem,) = problems_of(f"[node]\n[mlc]\ntiers = {value}\n")
    assert problem.startswith(f"f.toml:3: {says}")
    assert len(problem) < 200


def test_a_long_value_is_shown_by_its_beginning() -> None:
    (problem,) = problems_of(f"[log]\nlevel = '{1000 * 'x'}'\n")
    assert len(problem) < 200


@pytest.mark.parametrize("text", ['"a\\nb" = 1\n', '["a\\nb"]\n'])
def test_a_name_that_is_no_line_is_shown_in_one(text: str) -> None:
    (problem,) = problems_of(text)
    assert "a\\nb" in problem


def test_an_api_for_the_network_with_keys_or_openly() -> None:
    for line in ('keys_file = "/k"', "allow_anonymous = true"):
        text, _ = with_key("api", f'listen = "0.0.0.0:8000"\n{line}')
        assert parse_config(text, name="f.toml").api is not None


def test_empty_paths_are_no_paths() -> None:
    text, _ = with_key("api", 'keys_file = ""')
    config = parse_config(text, name="f.toml")
    assert config.api is not None and config.api.keys_file is None


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"No such file or directory; name a readable file with -c"
    ):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'[node]\nname = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="not UTF-8 text at octet 18"):
        load_config(latin)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_config(path).node.name == "n0"


# ---- the command


def sdcpd(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sdcpd", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert "Traceback" not in done.stderr
    return done


def test_the_command_prints_every_problem_and_exits_78(tmp_path: Path) -> None:
    path = tmp_path / "sdcpd.toml"
    path.write_text(GOOD.replace('name = "n0"', "nam = 0").replace('kind = "ngram"', "kind = 7"))
    for arguments in (["--role", "verifier"], ["--check-config"]):
        done = sdcpd(*arguments, "-c", path)
        assert done.returncode == 78
        first, second, last = done.stderr.splitlines()
        assert first.startswith(f"{path}:2: ") and second.startswith(f"{path}:14: ")
        assert last == "2 problems; not started."
        assert done.stdout == ""


def test_check_config_of_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "sdcpd.toml"
    path.write_text(GOOD)
    done = sdcpd("--check-config", "-c", path)
    assert (done.returncode, done.stdout) == (0, f"{path}: ok\n")


def test_a_role_without_its_section(tmp_path: Path) -> None:
    path = tmp_path / "sdcpd.toml"
    path.write_text("[node]\n")
    done = sdcpd("--role", "drafter-d1", "-c", path)
    assert done.returncode == 78
    assert "there is no [drafter] section, which --role drafter-d1 needs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --role router, verifier or drafter (or: sdcpd dev)"),
        (["--role", "drater"], 'did you mean "drafter"?'),
        (["--role", "drafter-"], "a name holds only letters"),
        (["--role", "drafter-../x"], "a name holds only letters"),
        (["--role", "drafter-a", "--role", "drafter-b"], "--role drafter is given twice"),
        (["--rol", "drafter"], "--role"),
        (["def"], "No such command 'def'"),
    ],
)
def test_usage_errors_exit_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    path = tmp_path / "sdcpd.toml"
    path.write_text(GOOD)
    done = sdcpd("-c", path, *arguments)
    assert done.returncode == 2
    assert says in re.sub(r"\s+", " ", done.stderr)


def test_check_config_with_a_role_looks_at_certificates_and_models(tmp_path: Path) -> None:
    """What a start would refuse is said before it: certificate and model directory."""
    file = tmp_path / "sdcpd.toml"
    file.write_text(
        '[verifier]\nbase_uri = "https://gpu1.lab:7443/"\nrouter = "https://r0.lab:7442/"\n'
        f'[verifier.model]\npath = "{tmp_path / "nowhere"}"\n'
        f'[tls]\nca = "{tmp_path}/ca.crt"\ncert = "{tmp_path}/v.crt"\nkey = "{tmp_path}/v.key"\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "sdcpd", "--role", "verifier-v0", "-c", str(file), "--check-config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert "v.crt" in done.stderr or "ca.crt" in done.stderr
    assert f"{tmp_path / 'nowhere'} does not exist" in done.stderr


ROUTER = '[router]\nbase_uri = "https://r0.lab:7442/"\nmodel = "/m"\n'
VERIFIER = '[verifier]\nbase_uri = "https://r0.lab:7443/"\nrouter = "https://r0.lab:7442/"\n'
REMOTE = '[mlc]\ntiers = [{ kind = "host", size = "1MiB" }, { kind = "remote", base = "%s" }]\n'


@pytest.mark.parametrize(
    ("text", "role", "says"),
    [
        (ROUTER + REMOTE % "https://R0.lab:7442", "router-r0", "which is router r0 itself"),
        (
            ROUTER + f"[mlc]\nlog_path = '/l/router-r0'\ntiers = [{LMDB % '/l/{instance}/mlc'}]\n",
            "router-r0",
            "are one directory, or one holds the other",
        ),
        (
            ROUTER + f"[mlc]\ntiers = [{LMDB % '/c/{role}'}, {LMDB % '/c/router'}]\n",
            "router-r0",
            "have the same path /c/router",
        ),
        (
            ROUTER + '[mlc]\ntiers = [{ kind = "pinned", size = "1000TiB" }]\n',
            "router-r0",
            "pinned tiers take their memory at the start",
        ),
    ],
)
async def test_what_an_instance_may_not_share_is_told_by_check_and_start(
    text: str, role: str, says: str
) -> None:
    config = parse_config(text, name="f.toml")
    kind, _, name = role.partition("-")
    instances = [Instance(kind, name, role)]
    assert any(says in problem for problem in check_of(config, instances))
    with pytest.raises(StartError, match=says) as caught:
        await Daemon(config, instances).run()
    assert caught.value.status == 78


def test_a_verifier_may_use_the_cache_of_the_router_of_the_same_file() -> None:
    model = '[verifier.model]\npath = "/m"\n'
    text = ROUTER + VERIFIER + model + REMOTE % "https://r0.lab:7442/"
    config = parse_config(text, name="f.toml")
    assert not list(place_problems(config, [Instance("verifier", "v0")]))
    both = [Instance("verifier", "v0"), Instance("router", "r0")]
    (problem,) = place_problems(config, both)
    assert "which is router r0 itself" in problem


def test_the_one_role_of_a_file_is_checked_without_being_named(tmp_path: Path) -> None:
    path = tmp_path / "sdcpd.toml"
    path.write_text(ROUTER + REMOTE % "https://r0.lab:7442/")
    done = sdcpd("--check-config", "-c", path)
    assert done.returncode == 78 and "itself: take the entry away" in done.stderr


@pytest.mark.parametrize(
    "keys",
    [
        'endpoint = "https://me:hush@s3.lab"',
        'access_key_id_file = "/k", secret_access_key_file = "hush"',
        'secret_access_key = "hush"',
    ],
)
def test_a_key_to_a_bucket_is_not_shown(keys: str) -> None:
    tier = f'{{ kind = "s3", size = "1GiB", bucket = "abc", {keys} }}'
    with pytest.raises(ConfigError) as caught:
        parse_config(f"[mlc]\ntiers = [{tier}]\n", name="x")
    assert "hush" not in str(caught.value)
