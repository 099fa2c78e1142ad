"""A real Chromium without a window, spoken to over a pipe in its own protocol: no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from support.needs import missing

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Chromium's own calls home are switched off, so that every request that is seen is the page's.
_OFF = ("gpu", "background-networking", "component-update", "sync", "default-apps", "extensions", "dev-shm-usage",
        "renderer-backgrounding", "backgrounding-occluded-windows", "background-timer-throttling")  # fmt: skip
_FLAGS = ("--headless=new", "--no-sandbox", "--no-first-run", "--no-default-browser-check", "--hide-scrollbars",
          "--force-device-scale-factor=1", "--mute-audio", "--remote-debugging-pipe",
          *(f"--disable-{name}" for name in _OFF))  # fmt: skip


def chromium() -> str:
    """Return the program, or end the test that needs it."""
    return next(filter(None, map(shutil.which, _NAMES)), None) or missing("chromium", "no Chromium on this machine")


class BrowserError(Exception):
    """The browser refused something, or a script in the page threw."""


class Browser:
    """One browser with a fresh profile; ends with the block."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        # Chromium reads from descriptor 3 and writes to 4.
        argv = ["sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', chromium(), *_FLAGS]
        self._process = subprocess.Popen(
            [*argv, f"--user-data-dir={self._profile}", "about:blank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._out, self._in, self._held = self._process.stdin, self._process.stdout.fileno(), b""
        self._messages, self._pages, self._number = deque[dict[str, Any]](), dict[str, Page](), 0

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(BrowserError, OSError):
            self.call("Browser.close", timeout_s=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str, *, width: int = 1280, height: int = 900, ready: str = "true") -> Page:
        """Open a page in a tab of its own, and wait until it has loaded and ``ready`` (a JavaScript test) is true."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Page.bringToFront")  # a tab behind another one is not painted
        page.resize(width, height)
        page.prefer()
        page.call("Page.navigate", url=url)
        page.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        page.wait_for(ready)
        return page

    def call(self, method: str, session: str | None = None, timeout_s: float = 60.0, **values: Any) -> dict[str, Any]:
        """Call one method of the protocol and return its answer."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": values, **({"sessionId": session} if session else {})}
        self._out.write(json.dumps(order).encode() + b"\0")
        self._out.flush()
        deadline = time.monotonic() + timeout_s
        while True:
            message = self._receive(deadline, method)
            if message.get("id") != self._number:
                if page := self._pages.get(message.get("sessionId", "")):
                    page.note(message["method"], message["params"])
            elif "error" in message:
                raise BrowserError(f"{method}: {message['error']['message']}")
            else:
                return dict(message["result"])

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while not self._messages:
            readable, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._in, 1 << 20) if readable else b""
            if not block:
                raise BrowserError(f"{method}: the browser does not answer")
            *whole, self._held = (self._held + block).split(b"\0")
            self._messages.extend(json.loads(text) for text in whole)
        return self._messages.popleft()


def _thrown(answer: dict[str, Any]) -> str:
    details = answer["exceptionDetails"]
    return str(details.get("exception", {}).get("description") or details["text"])


class Page:
    """One tab; ``errors`` and ``requests`` have all that it said and asked for."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session, self.errors, self.requests = browser, session, list[str](), list[str]()

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **values)

    def note(self, method: str, values: dict[str, Any]) -> None:
        """Keep what the tab reports by itself."""
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(_thrown(values))
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(one.get("value", one.get("description"))) for one in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(_thrown(answer))
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(script)):
            if time.monotonic() > deadline:
                raise BrowserError(f"never true: {script}; the page said {self.errors}")
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int) -> None:
        mobile = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, *, dark: bool = False, media: str = "") -> None:
        """Let the reader prefer light or dark, or let the page be printed (``media="print"``)."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 3, y=y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, x: float, y: float, across: float) -> None:
        """Press the mouse, move it across and let go."""
        self.point_at(x, y)
        steps = [
            ("mousePressed", 0.0),
            *(("mouseMoved", across * n / 5) for n in range(1, 6)),
            ("mouseReleased", across),
        ]
        for kind, moved in steps:  # each in a frame of its own, or a busy page takes them for a click
            self.evaluate("new Promise(requestAnimationFrame)")
            self.call("Input.dispatchMouseEvent", type=kind, x=x + moved, y=y, button="left", buttons=1, clickCount=1)

    def press(self, key: str) -> None:
        """Press a key by its name (Tab, Enter, ArrowRight), or a letter."""
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39}.get(key, 0)
        text = "\r" if key == "Enter" else key if len(key) == 1 else None
        values: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **values, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def texts(self, selector: str) -> list[str]:
        return list(self.evaluate(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)"))

    def count(self, selector: str) -> int:
        return int(self.evaluate(f"document.querySelectorAll({selector!r}).length"))

    def click(self, selector: str, number: int = 0) -> None:
        self.evaluate(f"document.querySelectorAll({selector!r})[{number}].click()")

    def fill(self, selector: str, value: str, event: str = "input") -> None:
        """Type into a field, or choose."""
        self.evaluate(f"{{ const field = document.querySelector({selector!r}); field.value = {value!r};"
                      f" field.dispatchEvent(new Event({event!r})); }}")  # fmt: skip

    def center(self, selector: str, across: float = 0.5, down: float = 0.5, number: int = 0) -> tuple[float, float]:
        """Bring an element into sight and return a place in it."""
        box = self.evaluate(
            f"(() => {{ const one = document.querySelectorAll({selector!r})[{number}];"
            " one.scrollIntoView({behavior: 'instant', block: 'center'});"
            " return one.getBoundingClientRect().toJSON(); })()"
        )
        return box["x"] + box["width"] * across, box["y"] + box["height"] * down

    def screenshot(self, path: Path, *, whole: bool = True, area: tuple[float, ...] | None = None) -> None:
        """Write a picture of the whole page, of what is in sight, or of an area (x, y, width, height)."""
        clip = {"clip": dict(zip(("x", "y", "width", "height", "scale"), (*area, 1), strict=True))} if area else {}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print_pdf(self) -> bytes:
        """Return the page as it would be printed."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    def close(self) -> None:
        self.call("Page.close")
