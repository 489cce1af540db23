"""A real browser at a real dashboard: Chromium under Playwright, and the app in a thread of its own on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect, sync_playwright
from support.free_ports import free_port

CHROMIUM = Path("/usr/bin/chromium")
WITHOUT = (
    # a process for each window, which holds the suggestions of an address bar that nobody sees
    *("WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),
    # what Playwright disables: of two such options Chromium takes the last
    *("AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose", "HttpsUpgrades", "LensOverlay"),
    *("HttpsFirstBalancedModeAutoEnable", "MediaRouter", "PaintHolding", "ThirdPartyStoragePartitioning"),
    *("AvoidCorsURLLoaderRestartOnRedirect", "OptimizationHints", "NetworkTimeServiceQuerying", "AimEnabled"),
    "PreconnectToSearch",
)
ARGUMENTS = (
    *("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-first-run", "--disable-gpu", "--disable-quic", f"--disable-features={','.join(WITHOUT)}"),
)
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1280, "height": 860}


@contextmanager
def browsing() -> Iterator[Browser]:
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


class Served:
    """An app at `url`, that can be stopped and come back there."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._port = free_port()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen()
        config = uvicorn.Config(self._app, log_config=None, lifespan="off", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(60)

    def close(self) -> None:
        with suppress(RuntimeError):
            self.stop()


def complaints(page: Page) -> list[str]:
    """What the page's console and scripts complain of, from now on; grows."""
    heard: list[str] = []
    page.on("console", lambda said: heard.append(said.text) if said.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: heard.append(str(error)))
    return heard
