"""The page at `/` in a real browser: over a real cluster, and what it makes of odd answers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit.browser import Browser, chromium, need_chromium
from tests.kit.chat_streams import Round, chunk, event, refusal, stream, texts, usage
from tests.kit.dev import Dev, dev

pytestmark = pytest.mark.slow
PROMPT = "Write a short story about a tiny dragon."
CHAT, STATUS, MODELS = "**/v1/chat/completions", "**/v1/sdcp/status", "**/v1/models"
ROUNDS: list[Round] = [
    ("Once upon a", " big", " time"),
    ("", " was", ",\n"),
    (" <b>there", "", "</b>"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    need_chromium()
    with dev(tmp_path_factory.mktemp("page") / "state") as running:
        yield running


@pytest.fixture
def browser(cluster: Dev, tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as opened:
        opened.page.goto(cluster.api.removesuffix("v1"))
        yield opened


def send(browser: Browser, text: str = PROMPT, *, max_tokens: int = 60) -> None:
    page = browser.page
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answered(browser: Browser, **options: Any) -> Any:
    """Send, and return the last answer once it is whole."""
    from playwright.sync_api import expect

    send(browser, **options)
    answer = browser.page.get_by_role("article", name="Answer").last
    expect(answer.locator(".text")).to_have_attribute("aria-busy", "false")
    return answer


def strip_text(answer: Any) -> str:
    """What the rounds come to without what was rejected, line ends as they were."""
    parts = answer.locator(".rounds .accepted, .rounds .own, .rounds .self")
    return "".join(parts.all_text_contents()).replace("↵", "\n")


def test_a_chat_is_streamed_and_its_rounds_are_shown(cluster: Dev, browser: Browser) -> None:
    """The text is the API's, and the strip's."""
    from playwright.sync_api import expect

    answer = answered(browser)
    with openai.OpenAI(base_url=cluster.api, api_key="unused") as client:
        whole = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=60,
            temperature=0,
        )
    text = whole.choices[0].message.content
    assert text and answer.locator(".text").text_content() == text
    expect(answer.locator(".strip")).to_be_visible()
    expect(answer.locator(".legend")).to_be_visible()
    assert strip_text(answer) == text
    assert answer.locator(".rounds .round").count() > 1
    names = ["tokens", "tokens per pass", "accepted", "to first token", "tokens/s"]
    assert answer.locator(".figures dt").all_text_contents() == names
    assert whole.usage is not None
    figure = answer.locator(".figures dd").first
    assert figure.text_content() == str(whole.usage.completion_tokens)
    browser.took_no_harm()


def test_without_speculation_the_text_is_the_same(browser: Browser) -> None:
    page = browser.page
    first = answered(browser).locator(".text").text_content()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("switch", name="Speculation").uncheck()
    answer = answered(browser)
    assert answer.locator(".text").text_content() == first
    assert strip_text(answer) == first
    assert answer.locator(".rounds .round").count() == answer.locator(".rounds .self").count() > 1
    browser.took_no_harm()


def test_what_was_said_before_is_sent_again(browser: Browser) -> None:
    answered(browser, max_tokens=8)
    with browser.page.expect_request(CHAT) as sent:
        answered(browser, text="And then?", max_tokens=8)
    body = sent.value.post_data_json
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert (body["max_tokens"], body["temperature"], "seed" in body) == (8, 0, False)
    assert sent.value.headers["x-sdcp-speculation"] == "on"
    browser.took_no_harm()


def test_the_instances_are_listed(cluster: Dev, browser: Browser) -> None:
    from playwright.sync_api import expect

    shown = browser.page.locator("#instances li")
    expect(shown).to_have_count(3)
    for name, role in (("v0", "verifier"), ("d0", "drafter"), ("d1", "drafter")):
        row = shown.filter(has_text=f"{name}.")
        expect(row).to_contain_text(role)
        expect(row.locator(".state")).to_have_text("ready")
    expect(browser.page.locator("#state")).to_have_text("ready")
    expect(browser.page.locator("#about")).to_contain_text("tiny")
    assert "https://" not in browser.page.locator("aside").inner_text()
    browser.took_no_harm()


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_session(browser: Browser, how: str) -> None:
    from playwright.sync_api import expect

    page = browser.page
    send(browser, max_tokens=1500)
    text = page.get_by_role("article", name="Answer").locator(".text")
    expect(text).not_to_be_empty()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.get_by_role("alert").filter(has_text="Stopped.")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("aside .figures dd").first).to_have_text("0")
    assert page.locator(".trouble", has_text="Stopped.").count() == 1
    browser.took_no_harm()


def test_a_refused_request_shows_its_sentence(browser: Browser) -> None:
    """And what was typed is there again."""
    from playwright.sync_api import expect

    answer = answered(browser, max_tokens=1_000_000)
    expect(answer.get_by_role("alert")).to_contain_text("context")
    expect(browser.page.get_by_label("Message", exact=True)).to_have_value(PROMPT)
    browser.took_no_harm(refused=400)
    answer = answered(browser, max_tokens=8)
    assert answer.locator(".text").text_content()


# ---- answers of other servers, and of one in trouble


def answer_with(browser: Browser, pattern: str, response: dict[str, Any]) -> None:
    browser.page.route(pattern, lambda route: route.fulfill(**response))


def test_parts_of_a_round_are_told_apart_without_colour(browser: Browser) -> None:
    """And a model's HTML stays text."""
    counted = usage(9, 4, 2, {"rounds": 3, "tokens_per_pass": 2.25, "self_decoded": 1})
    pieces = [chunk(texts([one]), one) for one in ROUNDS]
    alone = chunk(" end", ("", "", " end"), alone=True)
    answer_with(browser, CHAT, stream(*pieces, alone, counted))
    answer = answered(browser)
    text = f"{texts(ROUNDS)} end"
    assert answer.locator(".text").text_content() == text == strip_text(answer)
    assert answer.locator(".rounds .round").count() == 4
    assert answer.locator(".rounds del.rejected").all_text_contents() == [" big", " was"]
    assert answer.locator(".rounds .own").all_text_contents() == [" time", ",↵", "</b>"]
    assert answer.locator(".rounds .alone .self").all_text_contents() == [" end"]
    titles = answer.locator(".rounds [title^='Round 1: ']")
    assert titles.all_text_contents() == ["Once upon a", " big", " time"]
    figures = answer.locator(".figures dd").all_text_contents()
    assert figures[:3] == ["9", "2.25", "67 %"]
    browser.took_no_harm()


def test_what_gets_into_the_page_neither_runs_nor_calls_home(browser: Browser) -> None:
    """Also that a violation would not go unnoticed in the other tests."""
    browser.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "document.title = 'taken over'";
        document.body.append(script);
        new Image().src = "http://127.0.0.1:9/home";
    }""")
    assert browser.page.title() == "sdcpd"
    with browser.page.expect_event("console", lambda told: "img-src" in told.text):
        browser.page.evaluate("new Image().src = 'http://127.0.0.1:9/again'")
    found = " ".join(browser.problems)
    assert "policy violated: script-src" in found and "policy violated: img-src" in found


def test_a_server_that_tells_no_rounds(browser: Browser) -> None:
    from playwright.sync_api import expect

    answer_with(browser, CHAT, stream(": ping\n\n", chunk("Once upon"), chunk(" a time")))
    answer = answered(browser)
    assert answer.locator(".text").text_content() == "Once upon a time"
    expect(answer.locator(".strip")).to_be_hidden()
    browser.took_no_harm()


@pytest.mark.parametrize(
    ("events", "sentence"),
    [
        ([event({"error": {"message": "the session failed"}})], "the session failed"),
        ([], "The stream ended before the text did."),
    ],
)
def test_a_text_that_breaks_off_keeps_what_came(
    browser: Browser, events: list[str], sentence: str
) -> None:
    from playwright.sync_api import expect

    answer_with(browser, CHAT, stream(chunk("Once upon"), *events, done=False))
    answer = answered(browser)
    assert answer.locator(".text").text_content() == "Once upon"
    expect(answer.get_by_role("alert")).to_have_text(sentence)
    browser.took_no_harm()


def test_a_server_that_asks_for_a_key(browser: Browser) -> None:
    """It is in no storage that outlives the tab."""
    from playwright.sync_api import expect

    page = browser.page
    field = page.get_by_label("This server asks for an API key")
    expect(field).to_be_hidden()

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer sesame":
            route.continue_()
        else:
            route.fulfill(**refusal(401, "this API key is not known here", code="invalid_api_key"))

    for pattern in (CHAT, STATUS, MODELS):
        page.route(pattern, guard)
    page.reload()
    expect(field).to_be_focused()
    field.fill("wrong")
    field.press("Enter")
    expect(page.locator("#key-trouble")).to_have_text("this API key is not known here")
    field.fill("sesame")
    field.press("Enter")
    expect(field).to_be_hidden()
    expect(page.locator("#instances li")).to_have_count(3)
    assert answered(browser, max_tokens=8).locator(".text").text_content()
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("tiny")
    expect(field).to_be_hidden()
    browser.took_no_harm(refused=401)


def test_a_server_that_does_not_answer_is_asked_less_often(browser: Browser) -> None:
    from playwright.sync_api import expect

    page, trouble = browser.page, browser.page.locator("#live-trouble")
    expect(page.locator("#instances li")).to_have_count(3)
    page.route(STATUS, lambda route: route.abort())
    expect(trouble).to_contain_text("cannot be reached")
    expect(trouble).to_contain_text("next try in 8 s")
    expect(page.locator("#state")).to_have_text("no answer")
    page.unroute(STATUS)
    expect(trouble).to_be_hidden()
    expect(page.locator("#state")).to_have_text("ready")


def test_a_narrow_window_and_a_keyboard_are_enough(cluster: Dev, tmp_path: Path) -> None:
    from playwright.sync_api import expect

    with chromium(tmp_path / "profile", width=360, height=640, dark=True) as browser:
        page = browser.page
        page.goto(cluster.api.removesuffix("v1"))
        box = page.get_by_label("Message", exact=True)
        expect(box).to_be_focused()
        page.keyboard.type("Once")
        page.keyboard.press("Enter")
        answer = page.get_by_role("article", name="Answer")
        expect(answer.locator(".text")).to_have_attribute("aria-busy", "false")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        reached = []
        for _ in range(6):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id"))
        assert reached == ["send", "model", "temperature", "max-tokens", "seed", "speculation"]
        browser.took_no_harm()


def test_the_picture_of_the_documentation(cluster: Dev, tmp_path: Path) -> None:
    """Written where SDCPD_PAGE_PICTURE says, or nowhere that lasts."""
    from playwright.sync_api import expect

    to = Path(os.environ.get("SDCPD_PAGE_PICTURE", tmp_path / "page.png"))
    with chromium(tmp_path / "profile", height=700, scale=1.5) as browser:
        browser.page.goto(cluster.api.removesuffix("v1"))
        answered(browser, text="Tell me about the ocean at night.", max_tokens=90)
        known = browser.page.locator("#instances li", has_text=re.compile(r"accepted\d+ %"))
        expect(known.first).to_be_visible()
        browser.page.screenshot(path=to)
    assert to.stat().st_size > 10_000
