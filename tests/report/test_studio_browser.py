"""The studio in a real browser: started by its command, used by keyboard and script, in the light and the dark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from chromium import Browser, binary

import bespoke as library
from test_fedpc import settings

pytestmark = pytest.mark.skipif(binary() is None, reason="no Chromium or Chrome on the PATH")
pytest.importorskip("starlette")
pytest.importorskip("transformers")

HOSTILE = '<img src=x onerror="document.title=1">'
# What a screen reader is told: every control has a name.
UNNAMED = """
[...document.querySelectorAll("input, select, textarea, button")].filter((one) => {
  const named = one.labels && one.labels.length || one.getAttribute("aria-label") || one.textContent.trim();
  return !named;
}).map((one) => one.outerHTML)
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address that the command shows."""
    folder = tmp_path_factory.mktemp("studio-browser")
    library.run(settings(folder, rounds=1), folder / "run")
    command = [sys.executable, "-m", "bespoke", "studio", folder / "run", "--port", "0", "--people", folder / "people"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as server:
        assert server.stdout
        try:
            yield server.stdout.readline().split()[1]
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


def go(browser: Browser, address: str, dark: bool = False, width: int = 1100) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.call("Emulation.setEmulatedMedia", features=[scheme])
    browser.resize(width, 900)
    browser.call("Page.navigate", url="about:blank")
    browser.call("Page.navigate", url=address)
    browser.wait("document.readyState === 'complete' && document.getElementById('status')?.textContent")


def press(browser: Browser, key: str, code: int, text: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)


def test_a_prompt_is_written_side_by_side_by_keyboard(browser: Browser, address: str) -> None:
    go(browser, address)
    browser.wait("document.querySelectorAll('.js-plotly-plot').length === 2")
    assert browser.run("location.hash") == ""  # the token is not to be seen
    assert browser.run(UNNAMED) == []
    browser.run("document.getElementById('prompt').value = 'w1 w2'; document.getElementById('prompt').focus()")
    press(browser, "Enter", 13, "\r")
    browser.wait("document.getElementById('status').textContent === '4 texts are written.'")
    headings = browser.run("[...document.querySelectorAll('.card h3')].map((one) => one.textContent)")
    assert headings == ["anna, x", "bert, y", "anybody (a new user), x", "no prefix (the frozen model)"]
    texts = browser.run("[...document.querySelectorAll('.card p')].map((one) => one.textContent)")
    assert all(text.startswith("w1 w2") for text in texts)
    assert max(map(len, texts)) > len("w1 w2")
    assert browser.run("[...document.querySelectorAll('.card')].every((one) => one.ariaBusy === 'false')")
    press(browser, "Tab", 9)
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "Who, voice 1"
    browser.run("document.getElementById('sentence').value = 'w1 w2 w3'; document.getElementById('compare').click()")
    browser.wait("document.querySelectorAll('#scores tbody tr').length === 4")
    assert browser.run("document.querySelector('#scores tr.best td').textContent * 1 > 1")


def test_somebody_with_a_hostile_name_comes_and_goes(browser: Browser, address: str) -> None:
    go(browser, address, dark=True)
    browser.wait("document.querySelectorAll('.js-plotly-plot').length === 2")
    browser.run(f"""
      document.getElementById('name').value = {HOSTILE!r};
      document.getElementById('sentences').value = 'w1 w2 w3\\nw4 w5 w6';
      document.getElementById('learn').click();
    """)
    browser.wait("document.getElementById('status').textContent.includes('is learned')")
    assert browser.run("document.querySelectorAll('#studio img, .js-plotly-plot image').length") == 0
    assert browser.run("document.title") == "Studio · bespoke"
    assert browser.run("document.querySelectorAll('.voice').length") == 5
    assert HOSTILE in browser.run("document.getElementById('people').textContent")
    assert HOSTILE in browser.run("document.getElementById('figure-users').textContent")
    browser.run("document.querySelector('#people button').click()")
    assert browser.run("document.querySelector('#people button').textContent").startswith("Really delete")
    browser.run("document.querySelector('#people button').click()")
    browser.wait("document.getElementById('people').textContent === 'Nobody yet.'")
    browser.wait("document.activeElement.id === 'name'")


def test_without_the_token_the_page_says_what_to_do(browser: Browser, address: str) -> None:
    go(browser, address)
    browser.run("sessionStorage.clear()")
    go(browser, address.split("#")[0])
    assert "open the address that the terminal shows" in browser.run("document.getElementById('status').textContent")
    assert browser.run("document.getElementById('studio').hidden")


@pytest.mark.parametrize(("dark", "width"), [(False, 390), (True, 1100)])
def test_nothing_is_wider_than_the_window_and_texts_can_be_read(
    browser: Browser, address: str, dark: bool, width: int
) -> None:
    go(browser, address, dark, width)
    browser.wait("document.querySelectorAll('.js-plotly-plot').length === 2")
    assert browser.run("document.documentElement.scrollWidth") <= width
    colours = browser.run("['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])")
    light = [sum(int(part) for part in colour.strip("rgb()").split(",")) / 765 for colour in colours]
    assert (light[0] > 0.8 > 0.2 > light[1]) if dark else (light[1] > 0.8 > 0.2 > light[0])
