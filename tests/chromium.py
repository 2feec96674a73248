"""A headless Chromium, spoken to over its DevTools pipe; no driver and no library in between."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

HANG = 120.0  # seconds; a limit against hanging, generous because machines are shared


def find_chromium():
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Chromium:
    def __init__(self, profile):
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        # It reads commands from descriptor 3 and answers on 4.
        start = f'exec "$@" 3<&{read} 4>&{write}'
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # Its sandbox needs privileges that containers lack; the only page it opens is our own.
        flags += ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        self._process = subprocess.Popen(
            ["bash", "-c", start, "bash", find_chromium(), *flags, "about:blank"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._buffer, self._number = b"", 0
        self.events = []

    def send(self, method, session=None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + HANG
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method, session):
        end = time.monotonic() + HANG
        while not any(e["method"] == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self._receive(end))

    def _receive(self, end):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(end - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"chromium did not answer in {HANG:g} s")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("chromium ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=1280, height=900):
        return Page(self, path, width, height)

    def close(self):
        self.send("Browser.close")
        self._process.wait(HANG)
        os.close(self._to)
        os.close(self._from)


class Page:
    """An open file; `complaints` are its console errors, exceptions and network requests."""

    def __init__(self, browser, path, width, height):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        self.url = path.resolve().as_uri()
        self.send("Page.navigate", url=self.url)
        browser.wait_for("Page.loadEventFired", self.session)

    def send(self, method, **params):
        return self.browser.send(method, self.session, **params)

    def resize(self, width, height=900):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script):
        """Evaluate JavaScript, promises included, and return its value."""
        options = {"returnByValue": True, "awaitPromise": True}
        done = self.send("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"]["description"])
        return done["result"].get("value")

    def press(self, key):
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9, " ": 32}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code)  # fmt: skip

    def complaints(self):
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            kind, params = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            if kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(params["args"])
            if kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"])
            if kind == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if url != self.url and not url.startswith(("data:", "blob:")):
                    found.append(url)
        return found

    def screenshot(self, path):
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self, path):
        printed = self.send("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)
        path.write_bytes(base64.b64decode(printed["data"]))
