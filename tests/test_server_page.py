"""The server's page: one file that loads nothing; its script in node and in Chromium, where there are such."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.speed._browser import missing, wait_for, window
from fronts import SAYS, front, tiny_tokenizer
from moesched.server.front import PAGE
from report_pages import PageElements
from served_processes import server

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCRIPT = PAGE.decode().partition("<script>")[2].partition("</script>")[0]


async def test_the_page_is_there_without_a_key_and_may_load_nothing() -> None:
    async with front(key="secret") as server:
        response = await server.http.get("/", headers={})
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert response.content == PAGE


def test_the_page_names_no_other_address() -> None:
    page = PageElements(PAGE.decode())
    assert not page.open, "every element is closed"
    assert all("src" not in each for each in page.find("script") + page.find("img"))
    assert [each["href"] for each in page.find("link")] == ["data:,"]
    assert "http" not in PAGE.decode().replace("https://", "http://").partition("<body>")[2]


def test_each_field_of_the_page_has_a_name_for_those_who_hear_it() -> None:
    page = PageElements(PAGE.decode())
    assert all("aria-label" in each for each in page.find("textarea"))
    assert page.find("html") == [{"lang": "en"}]


def computed(expression: str) -> Any:
    """The value of an expression after the page's script."""
    if shutil.which("node") is None:
        pytest.skip("needs node; this machine has none")
    program = f"{SCRIPT}\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_parts_of_the_script_do_as_they_say() -> None:
    before = "{at: 1, busy: {cpu: 0.5}}"
    assert computed(
        f"""[
        eventsOf("data: a\\n\\n: comment\\n\\ndata: b\\n\\ndata: c"),
        sharesOf({before}, {{at: 3, busy: {{cpu: 1.5, disk: 9}}}}),
        sharesOf({before}, {before}),
        faultOf('{{"error": {{"message": "m"}}}}', 400),
        faultOf("<html>", 502),
        reasonOf(new TypeError("network error")),
        reasonOf(new Error("too long")),
        ]"""
    ) == [
        [["a", "b"], "data: c"],
        {"cpu": 0.5, "disk": 1},
        {"cpu": 0},
        "m",
        "the server answered 502",
        "The connection to the server broke off.",
        "too long",
    ]


# ---------------------------------------------------------------- in Chromium

ENDED = "stop === null"
CONTENTS = "messages.map((message) => message.content)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """The page of a server that repeats a text, a token every 5 ms."""
    if reason := missing():
        pytest.skip(reason)
    says = tiny_tokenizer().encode(SAYS, bare=True)
    with server(says=says, pace=0.005) as (_, url), window((390, 740)) as page:
        page.goto(url)
        yield page


@pytest.fixture
def page(browser: Page) -> Page:
    """The page, just opened."""
    browser.reload()
    wait_for(browser, "model === 'fake'")
    return browser


def send(page: Page, text: str, tokens: int) -> None:
    """Send a message."""
    page.fill("#tokens", str(tokens))
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_a_message_is_answered_and_the_next_one_follows_it(page: Page) -> None:
    for text in ("Hello", "again"):
        with page.expect_request("**/v1/chat/completions") as asked:
            send(page, text, len(tiny_tokenizer().encode(SAYS, bare=True)))
        wait_for(page, ENDED)
    assert [each["content"] for each in asked.value.post_data_json["messages"]] == ["Hello", SAYS, "again"]
    assert page.evaluate(CONTENTS) == ["Hello", SAYS, "again", SAYS]
    assert page.inner_text(".assistant >> nth=-1") == SAYS


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_came(page: Page) -> None:
    send(page, "Hello", 200)
    wait_for(page, "document.querySelector('.coming')?.textContent.length > 3")
    page.click("#send")
    wait_for(page, ENDED)
    question, answer = page.evaluate(CONTENTS)
    assert question == "Hello" and SAYS.startswith(answer[:20])
    assert page.inner_text("#send") == "Send"
    assert page.inner_text("#hint") == "", "it did not end by itself"


def test_a_message_that_is_refused_says_why_and_can_be_sent_again(page: Page) -> None:
    send(page, "Hello", 100_000)
    wait_for(page, ENDED)
    assert "lower max_tokens" in page.inner_text(".error")
    assert page.input_value("#text") == "Hello"
    assert page.evaluate(CONTENTS) == []


def test_a_new_chat_has_nothing_of_an_answer_that_was_still_coming(page: Page) -> None:
    send(page, "Hello", 200)
    wait_for(page, "document.querySelector('.coming')?.textContent.length > 3")
    page.click("#fresh")
    wait_for(page, ENDED)
    assert page.evaluate(CONTENTS) == []
    assert page.query_selector(".message") is None
