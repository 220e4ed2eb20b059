"""The server's page: one file that loads nothing, and the parts of its script, in node where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from fronts import Server, answered
from moesched.server.page import PAGE
from report_pages import PageElements

SCRIPT = PAGE.decode().partition("<script>")[2].partition("</script>")[0]


def test_the_page_is_there_without_a_key_and_may_load_nothing() -> None:
    async def use(server: Server) -> None:
        response = await server.http.get("/", headers={})
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        assert response.content == PAGE

    answered(use, key="secret")


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
