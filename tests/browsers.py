"""Pages in Debian's Chromium, by its own pipe, or by Playwright where it is installed.

Both give what a test needs: open a page of some width, move the pointer, press keys, ask for the
value of an expression, and what was requested and complained about.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
LAUNCH = """
import os, sys
read, write = map(int, sys.argv[1:3])
os.dup2(read, 50), os.dup2(write, 51)
os.dup2(50, 3), os.dup2(51, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
CODES = {"Enter": 13, " ": 32, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
         "ArrowDown": 40}  # fmt: skip


def chromium():
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium on the path to open the page with")
    return found


class Pipe:
    """A page of a Chromium that is spoken to through its debugging pipe."""

    def __init__(self, write, read, folder):
        self.write, self.read, self.folder = write, read, folder
        self.number, self.rest, self.session = 0, b"", None
        self.requests, self.errors, self.events = [], [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while (answer := self.next()).get("id") != self.number:
            self.note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next(self):
        while b"\0" not in self.rest:
            got = os.read(self.read, 2**20)
            assert got, "chromium has ended"
            self.rest += got
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def note(self, event):
        name, facts = event.get("method"), event.get("params", {})
        self.events.append(name)
        if name == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(facts["exceptionDetails"]))
        if name == "Runtime.consoleAPICalled":
            self.errors.append(str(facts["args"]))
        if name == "Log.entryAdded":
            self.errors.append(facts["entry"]["text"])
        assert name != "Page.javascriptDialogOpening", facts

    def goto(self, url, width=1000, height=900, dark=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        for address in ("about:blank", url):  # so that another hash is another visit
            self.requests.clear()
            self.errors.clear()
            self.events.clear()
            self.call("Page.navigate", url=address)
            while "Page.loadEventFired" not in self.events:
                self.note(self.next())

    def ask(self, expression):
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def hover(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x, y):
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        code = CODES.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "windowsVirtualKeyCode": code, "nativeVirtualKeyCode": code}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **about, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)


@contextmanager
def by_pipe(folder):
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"]
    command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), chromium(), *flags]
    process = subprocess.Popen(
        command,
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Pipe(ours_out, ours_in, folder)
        yield page
        page.session = None
        page.call("Browser.close")
    finally:
        os.close(ours_out)
        os.close(ours_in)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Played:
    """The same by Playwright."""

    def __init__(self, page):
        self.page, self.requests, self.errors = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", lambda dialog: self.errors.append(dialog.message))

    def goto(self, url, width=1000, height=900, dark=False):
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto("about:blank")
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
def by_playwright(folder):
    play = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with play.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield Played(browser.new_context(offline=True).new_page())
        browser.close()


DRIVERS = {"pipe": by_pipe, "playwright": by_playwright}
