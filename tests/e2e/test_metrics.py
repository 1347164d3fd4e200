"""A real cluster exports every metric that the dashboard and the alerts ask for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdcpd.metrics.families import FAMILIES
from tests.kit.by_hand import Sdcpd
from tests.kit.by_hand_site import make_site
from tests.kit.dev import Dev, dev
from tests.kit.metrics import Scrape
from tests.kit.promql import selectors
from tests.test_monitoring import expressions, family_name

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with dev(tmp_path_factory.mktemp("dev") / "state") as running:
        yield running


def scraped(cluster: Dev) -> dict[str, Scrape]:
    """What each instance tells at its port, by name."""
    found = {}
    for one in cluster.state["instances"]:
        with urllib.request.urlopen(one["metrics"], timeout=10) as answer:
            found[one["name"]] = Scrape.of(answer.read())
    return found


def ask(cluster: Dev, **more: object) -> urllib.request.Request:
    body = {"prompt": "The ocean at night", "max_tokens": 48, "temperature": 0, **more}
    return urllib.request.Request(
        f"{cluster.api}/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )


def test_all_that_is_asked_for_is_there(cluster: Dev) -> None:
    """In the middle of a text, when there is something to tell of everything."""
    request = ask(cluster, stream=True, max_tokens=400, ignore_eos=True)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        names = set().union(*(one.names for one in scraped(cluster).values()))
        answer.read()
    told = {family_name(name) for name in names}
    assert told <= set(FAMILIES)
    asked = {one.name for text in expressions() for one in selectors(text)} - {"up"}
    assert asked - names == set()
    # What a healthy cluster of these processes has nothing to say of.
    assert set(FAMILIES) - told <= {"sdcp_local_requests_total"}


def test_the_figures_are_those_of_the_texts(cluster: Dev) -> None:
    before = scraped(cluster)
    usages = []
    for _ in range(3):
        with urllib.request.urlopen(ask(cluster), timeout=60) as answer:
            usages.append(json.load(answer)["usage"])
    after = scraped(cluster)

    def grown(instance: str, name: str, **labels: str) -> float:
        return after[instance](name, **labels) - before[instance](name, **labels)

    assert grown("r0", "sdcp_api_requests_total", route="/v1/completions", code="200") == 3
    for kind in ("prompt", "completion"):
        wanted = sum(usage[f"{kind}_tokens"] for usage in usages)
        assert grown("r0", f"sdcp_api_{kind}_tokens_total") == wanted
    assert grown("r0", "sdcp_api_time_to_first_token_seconds_count") == 3
    rounds = sum(usage["sdcp"]["rounds"] for usage in usages)
    assert grown("v0", "sdcp_rounds_total") == rounds > 0
    assert grown("v0", "vllm:spec_decode_num_drafts_total", model_name="target") == rounds
    drafters = [name for name in after if name.startswith("d")]
    assert sum(grown(name, "sdcp_rounds_total") for name in drafters) == rounds
    passes = grown("v0", "sdcp_batch_proposals_sum")
    assert passes == rounds + grown("v0", "sdcp_self_decoded_tokens_total")
    for stage in ("queue", "batch_wait", "score", "commit", "total"):
        assert grown("v0", "sdcp_round_duration_seconds_count", stage=stage) == rounds


def test_health_and_readiness(cluster: Dev) -> None:
    for one in cluster.state["instances"]:
        for path, wanted in (("health", {"status": "ok"}), ("ready", {"ready": True})):
            uri = one["metrics"].replace("metrics", path)
            with urllib.request.urlopen(uri, timeout=10) as answer:
                assert json.load(answer).items() >= wanted.items()


def test_dev_json_says_where(cluster: Dev) -> None:
    assert Path(cluster.directory / "dev.json").is_file()
    ports = {one["metrics"] for one in cluster.state["instances"]}
    assert len(ports) == len(cluster.state["instances"])


def test_the_roles_of_one_process_are_one_text(tmp_path: Path) -> None:
    """Put up by hand, all three in one."""
    site = make_site(tmp_path)
    port = site.ports["free"]
    sections = [
        line for role in ("router", "verifier", "drafter") for line in site.section(role, role)
    ]
    config = site.config("all", *sections, "[metrics]", f'listen = "127.0.0.1:{port}"')
    process = Sdcpd(tmp_path, "router-r0", "verifier-v0", "drafter-d0", config=config)
    try:
        process.wait_notified("READY=1")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            seen = Scrape.of(answer.read())
        assert set(seen.by("sdcp_build_info", "role")) == {"router", "verifier", "drafter"}
        assert set(seen.by("sdcp_ready", "role")) == {"router", "verifier", "drafter"}
        assert process.stop() == 0, process.log
    finally:
        process.process.kill()
        process.process.wait()
