"""A real Chromium without a window, driven over a pipe by its DevTools protocol.

For tests of pages: what they show, what they log, and whom they talk to. The pipe (messages ended
by a zero byte, on file descriptors 3 and 4) needs no port and no library.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time  # noqa: TID251 a real browser needs real time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

COMMANDS: Final = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S: Final = 30.0
_ON_3_AND_4: Final = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.close(read)
os.close(write)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, with the pipe where it expects it."""
POLL_S: Final = 0.1


def find_chromium() -> str | None:
    """Return the path of an installed Chromium, or ``None``."""
    return next((path for name in COMMANDS if (path := shutil.which(name))), None)


class Page:
    """One tab; made by `open_page`.

    Attributes:
        requests: URLs of everything that was asked for.
        complaints: Exceptions, console errors and violations of the page's security policy.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write = write
        self._read = read
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def attach(self) -> None:
        """Open the tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to ``url``."""
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> object:
        """Return what a JavaScript expression is worth, as JSON holds it.

        Raises:
            RuntimeError: It threw.
        """
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        result: dict[str, object] = found["result"]
        return result.get("value")

    def wait(self, expression: str, timeout_s: float = ANSWER_S) -> None:
        """Wait until a JavaScript expression is true; one that throws is not (the page loads).

        Raises:
            TimeoutError: With the page's text.
        """
        end_s = time.monotonic() + timeout_s
        tried = f"(() => {{ try {{ return {expression}; }} catch (error) {{ return false; }} }})()"
        while not self.value(tried):
            if time.monotonic() > end_s:
                shown = self.value("document.body ? document.body.innerText : ''")
                raise TimeoutError(f"{expression} stayed false; {self.complaints}; page: {shown}")
            time.sleep(POLL_S)

    def type(self, text: str) -> None:
        """Type into whatever has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, width: int = 1280, height: int = 1000) -> None:
        """Save what the page looks like, as PNG."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(0.5)  # the page draws its charts anew for the new size
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the protocol and return its result.

        Raises:
            RuntimeError: The browser refused.
            TimeoutError: It does not answer.
        """
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end_s = time.monotonic() + ANSWER_S
        while True:
            heard = self._next(end_s - time.monotonic())
            if heard.get("id") == self._last:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                result: dict[str, Any] = heard["result"]
                return result
            self._note(heard.get("method", ""), heard.get("params", {}))

    def _next(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, timeout_s))
            if not ready:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._read, 1 << 16)
            if not more:
                raise TimeoutError("the browser has ended")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def open_page(chromium: str, *, any_certificate: bool = False) -> Iterator[Page]:
    """Start a browser with a fresh profile and one empty tab; both end with the context.

    Args:
        chromium: See `find_chromium`.
        any_certificate: As if the user had clicked the warning away.
    """
    to_browser, write = os.pipe()
    read, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
            *("--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"),
            *(["--ignore-certificate-errors"] if any_certificate else []),
        ]
        process = subprocess.Popen(  # noqa: S603 the browser that is installed
            [sys.executable, "-c", _ON_3_AND_4, str(to_browser), str(from_browser), *words],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            page = Page(write, read)
            page.attach()
            yield page
        finally:
            os.close(write)  # the browser ends when nobody drives it
            os.close(read)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
