"""Headless Chromium by the DevTools protocol over a pipe: no driver, no package, no port."""

from __future__ import annotations

import base64
import io
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds for one answer
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def binary() -> str | None:
    """Return the path of a Chromium or Chrome binary, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; `call` sends a command of the DevTools protocol and returns its result."""

    def __init__(self, profile: Path) -> None:
        path = binary()
        assert path
        (commands_out, commands), (answers, answers_in) = os.pipe(), os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4; the shell puts the pipes there.
        shell = f'exec "$@" 3<&{commands_out} 4>&{answers_in}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands_out, answers_in), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands_out)
        os.close(answers_in)
        self.commands, self.answers = commands, answers
        self.rest, self.last, self.session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.last += 1
        session = {"sessionId": self.session} if self.session else {}
        message = {"id": self.last, "method": method, "params": parameters, **session}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            while b"\0" not in self.rest:
                ready, _, _ = select.select([self.answers], [], [], max(deadline - time.monotonic(), 0.0))
                assert ready, f"{method}: no answer within {PATIENCE:.0f} s"
                read = os.read(self.answers, 1 << 20)
                assert read, f"{method}: the browser has ended"
                self.rest += read
            text, self.rest = self.rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("id") == self.last:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, page: Path, width: int, dark: bool = False, height: int = 900) -> None:
        """Load a page at this width in CSS pixels, in the light or the dark theme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window; a narrow one is a phone's, whose layout follows the viewport's meta element."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def run(self, script: str) -> Any:
        """Evaluate a script in the page, awaiting promises, and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def screenshot(self, **clip: float) -> Image.Image:
        """Picture of the page, or of the part of it that `clip` (x, y, width, height) names."""
        part = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, **part)["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

    def close(self) -> None:
        self.session = ""
        self.call("Browser.close")
        os.close(self.commands)
        os.close(self.answers)
        self.process.wait(PATIENCE)
