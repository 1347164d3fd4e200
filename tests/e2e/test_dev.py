"""`sdcpd dev` from outside: real processes, real mutual TLS, the bundled pair.

Over what is the default, HTTP/2, and over HTTP/3 alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from sdcpd.protocol.digest import output_digest
from tests.kit.dev import COMMAND, PAIR, Dev, dev, environment, once

DRAFTERS = {
    "model": ("--drafter", str(PAIR / "drafter")),
    "ngram": ("--drafter", "ngram"),
    "none": ("--drafter", "none"),
}
OVER_HTTP_3 = {"model over HTTP/3": (*DRAFTERS["model"], "--transport", "h3")}


TRANSPORTS = ["auto", pytest.param("h3", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=TRANSPORTS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dev]:
    with dev(tmp_path_factory.mktemp("dev") / "state", "--transport", request.param) as running:
        yield running


def test_the_printed_curl_line_answers(cluster: Dev) -> None:
    (line,) = re.findall(r"curl .*", cluster.banner)
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in done.stdout.replace(" ", "")


def test_dev_json_tells_where_everything_is(cluster: Dev) -> None:
    names = [i["name"] for i in cluster.state["instances"]]
    assert names == ["r0", "v0", "d0", "d1"]
    assert cluster.state["trust_domain"] == "dev.sdcp"
    for instance in cluster.state["instances"]:
        os.kill(instance["pid"], 0)
        assert Path(instance["cert"]).is_file() and Path(instance["key"]).is_file()
        assert instance["base_uri"].startswith("https://127.0.0.1:")
    assert Path(cluster.state["ca"]).is_file()


def test_openai_client_streams_a_chat(cluster: Dev) -> None:
    client = openai.OpenAI(base_url=cluster.api, api_key="unused")
    messages = [{"role": "user", "content": "Write a short story about a tiny dragon."}]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model="tiny",
            messages=messages,
            stream=True,
            max_tokens=40,
            temperature=0,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    whole = client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=messages, max_tokens=40, temperature=0
    )
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == usage.completion_tokens <= 40
    assert whole.usage.prompt_tokens == usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    client.close()


def test_speculation_pays(cluster: Dev) -> None:
    """The drafters save target passes."""
    found = cluster.generate("Write a short story about a tiny dragon.", 64, chat=True)
    assert found["tokens_per_pass"] > 1.2
    assert found["digest"] == output_digest(found["tokens"])
    assert found["rounds"] + found["self_decoded"] > 0


@pytest.mark.slow
def test_a_seed_gives_one_text_with_every_drafter_and_across_restarts(cluster: Dev) -> None:
    """R-Z-2: the other drafters' runs are new clusters."""
    prompt = "The ocean at night"
    texts = [cluster.generate(prompt, 40, temperature=0.9, seed=7)["tokens"]]
    for name in ("ngram", "none"):
        sampled = ("--prompt", prompt, "--max-tokens", "40", "--temperature", "0.9")
        texts.append(once(*DRAFTERS[name], *sampled, "--seed", "7")["tokens"])
    assert texts[0] == texts[1] == texts[2]
    assert cluster.generate(prompt, 40, temperature=0.9, seed=8)["tokens"] != texts[0]


def test_a_killed_drafter_is_not_noticed(cluster: Dev) -> None:
    """R-6.9-1: the text is the same before and after."""
    wanted = cluster.generate("Once upon a time", 48)["tokens"]
    os.kill(cluster.instance("d0")["pid"], signal.SIGKILL)
    assert cluster.generate("Once upon a time", 48)["tokens"] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_verifier_is_replaced_in_the_middle_of_a_stream(
    tmp_path: Path, transport: str
) -> None:
    """R-6.9-9, R-6.9-12: with a spare verifier the client sees nothing."""
    with dev(tmp_path / "state", "--verifiers", "2", "--transport", transport) as running:
        client = openai.OpenAI(base_url=running.api, api_key="unused")
        request = {
            "model": "tiny",
            "prompt": "Once upon a time",
            "max_tokens": 200,
            "temperature": 0,
        }
        wanted = client.completions.create(**request).choices[0].text  # type: ignore[call-overload]
        stream = client.completions.create(**request, stream=True)  # type: ignore[call-overload]
        text, killed = "", False
        for chunk in stream:
            text += chunk.choices[0].text
            if not killed and len(text) > 10:
                killed = True
                sessions = running_sessions(running)
                name = next(
                    i["name"]
                    for i in running.state["instances"]
                    if i["base_uri"] == sessions[0]["verifier"]
                )
                os.kill(running.instance(name)["pid"], signal.SIGKILL)
        client.close()
        assert killed and text == wanted


@pytest.mark.slow
def test_who_has_two_verifiers_is_told_how_to_kill_one(tmp_path: Path) -> None:
    """The banner's curl line runs long enough for its kill line; what goes on is said."""
    with dev(tmp_path / "state", "--verifiers", "2", "--drafter", "ngram") as running:
        kill, other = re.findall(r"kill -9 (\d+)", running.banner)
        assert [int(kill), int(other)] == [running.instance(v)["pid"] for v in ("v0", "v1")]
        assert '"max_tokens": 1500' in running.banner
        assert running.process.stdout is not None
        os.kill(int(kill), signal.SIGKILL)
        assert "verifier v0 ended (-9): " in running.process.stdout.readline()
        assert running.process.stdout.readline() == "  its sessions go on at verifier v1\n"


@pytest.mark.slow
def test_a_verifier_is_killed_and_the_text_is_the_same() -> None:
    """R-6.9-9: the failover strip, with a real kill -9, for people and for programs."""
    kill = ("--verifiers", "2", "--kill-verifier", "--drafter", "ngram")
    found = once(*kill, "--max-tokens", "600")
    assert found["same"] is True
    digests, times_s = found["digests"], found["times_s"]
    assert digests["undisturbed"] == digests["killed"]
    assert [len(times_s[run]) for run in ("undisturbed", "killed")] == [600, 600]
    dead_s = found["killed"]["at_s"]
    assert found["killed"]["verifier"] in ("verifier v0", "verifier v1")
    before = sum(time_s <= dead_s for time_s in times_s["killed"])
    assert 200 <= before < 600
    assert found["gap_s"] > max(b - a for a, b in pairwise(times_s["undisturbed"]))
    done = subprocess.run(
        [*COMMAND, "--once", *kill, "--max-tokens", "600", "--temperature", "0.8", "--seed", "7"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=True,
    )
    undisturbed, killed, *_ = done.stdout.splitlines()
    assert re.fullmatch(r"undisturbed \|[#.]+\|", undisturbed)
    assert re.fullmatch(r"killed      \|[#.]+x[#.]*\|", killed)
    assert "same text: yes" in done.stdout


@pytest.mark.slow
def test_a_text_that_is_too_short_to_be_disturbed() -> None:
    done = subprocess.run(
        [*COMMAND, "--once", "--verifiers", "2", "--kill-verifier", "--max-tokens", "1"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "ask for more with --max-tokens" in done.stderr


def running_sessions(running: Dev) -> list[dict[str, str]]:
    from sdcpd.admin_client import ask

    return list(ask(Path(running.instance("r0")["admin"]), "GET", "/status")["sessions"])


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, transport: str) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--drafter", "ngram", "--transport", transport],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment(), "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    said = ""
    while "Stop: Ctrl-C" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(children) == 3
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "nothing is left behind" in rest
    assert list(tmp_path.iterdir()) == []
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), 0)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--target", "/nowhere"), 78, "no such directory"),
        (("--drafter", "/nowhere"), 78, "/nowhere"),
        (("--verifiers", "0"), 2, "verifiers"),
        (("--colour",), 2, "No such option"),
    ],
)
def test_bad_options_are_one_sentence(options: tuple[str, ...], code: int, words: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--once", *options],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stderr


@pytest.mark.slow
def test_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--port", str(port), "--drafter", "ngram"],
            capture_output=True,
            text=True,
            env={**environment(), "TMPDIR": str(tmp_path)},
            timeout=60,
            check=False,
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(rf"127\.0\.0\.1:{port}: .*in use", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_model_directory_that_lacks_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"]})
    )
    done = subprocess.run(
        [*COMMAND, "--once", "--target", str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert "tokenizer.json is missing" in done.stderr or "GPT2LMHeadModel" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--keep", "/proc/x"), "--keep /proc/x"),
        (("--keep", __file__), "--keep"),
        (("--drafter", "none", "--drafter", "ngram"), "stands alone"),
        (("--temperature", "nan"), "--temperature"),
        (("--seed", str(1 << 64)), "--seed"),
        (("--kill-verifier",), "--verifiers 2"),
        (("--kill-verifier", "--verifiers", "2", "--temperature", "1"), "--seed"),
    ],
)
def test_options_that_contradict(options: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [*COMMAND, "--once", *options],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert words in done.stderr


def test_a_drafter_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(PAIR / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / "tokenizer.json").write_text("{}")
    done = subprocess.run(
        [*COMMAND, "--once", "--drafter", str(tmp_path / "drafter")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 78 and "target's tokenizer" in done.stderr


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"temperature": "hot"}, "temperature must be"),
        ({"seed": "seven"}, "seed must be"),
        ({"prompt": 7}, "prompt must be"),
        ({"max_tokens": 1 << 20}, "must not exceed the model's context"),
    ],
)
def test_the_admin_socket_names_what_is_wrong(
    cluster: Dev, body: dict[str, object], words: str
) -> None:
    from sdcpd.admin_client import AdminRefused, ask

    socket = Path(cluster.instance("r0")["admin"])
    with pytest.raises(AdminRefused, match=words):
        ask(socket, "POST", "/generate", {"prompt": "A", "max_tokens": 4, **body})
