"""Pages in Debian's Chromium, driven by Playwright: open a page of some width, move the pointer,
press keys, ask for the value of an expression, and what was requested and complained about."""

import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]


CUT = """[...document.querySelectorAll('td, th, .column, img, svg, canvas')].filter(each => {
  const edge = each.getBoundingClientRect();
  if (!edge.width) return false;
  for (let box = each.parentElement; box; box = box.parentElement) {
    const hides = getComputedStyle(box).overflowX;
    if (hides === 'auto' || hides === 'scroll') return false;
    if (hides !== 'visible' && box.getBoundingClientRect().right < edge.right - 1) return true;
  }
  return edge.right > document.documentElement.clientWidth + 1;
}).map(each => each.outerHTML.slice(0, 90))"""
"""Columns and pictures that end beyond what one can see, and that no box lets one scroll to."""


def chromium():
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium on the path to open the page with: apt install chromium")
    return program


class Page:
    def __init__(self, page):
        self.page, self.requests, self.errors = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(dialog.message))

    def goto(self, url, width=1000, height=900, dark=False):
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto("about:blank")  # so that another hash is another visit
        self.requests.clear()
        self.errors.clear()
        self.page.goto(url)

    def ask(self, expression):
        return self.page.evaluate(expression)

    def hover(self, x, y):
        self.page.mouse.move(x, y)

    def click(self, x, y):
        self.page.mouse.click(x, y)

    def press(self, key):
        self.page.keyboard.press("Space" if key == " " else key)


@contextmanager
def browser_page():
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield Page(browser.new_context(offline=True).new_page())
        browser.close()
