"""Chromium without a window, for tests of pages and of JupyterLab.

Nothing that a page asks for may leave the machine: every request is recorded, and
what is not a file, data, or the given local server is refused.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dlrm_workbook.doctor import find_browser
from dlrm_workbook.ground.machine import REPOSITORY

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# Marks are what a trace draws: bars, lines, points, slices, cells of a heat map, or
# pixels of a canvas. Axes, grids and legends do not count.
# One is enough, and a figure that has drawn is not looked at again: counting all of them took
# the time in which the others could have been drawn.
DRAWN = """
() => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => {
  const isSeen = (mark) => {
    const box = mark.getBoundingClientRect();
    return box.width > 0 || box.height > 0;
  };
  const hasPixels = (canvas) => {
    if (!canvas.width || !canvas.height) return false;
    const copy = document.createElement("canvas");
    copy.width = canvas.width; copy.height = canvas.height;
    const context = copy.getContext("2d");
    context.drawImage(canvas, 0, 0);
    return context.getImageData(0, 0, copy.width, copy.height).data.some((v) => v > 0);
  };
  plot.hasMarks ||= [...plot.querySelectorAll([
    ".cartesianlayer .trace path", ".cartesianlayer .trace rect", ".polarlayer .trace path",
    ".heatmaplayer image", ".contourlayer path", "path.surface", ".pielayer path",
    ".indicatorlayer text", ".sankey path", ".table text",
  ].join(","))].some(isSeen) || [...plot.querySelectorAll("canvas")].some(hasPixels);
  return plot.hasMarks;
})
"""


WRONG = lambda said: said.type == "error" or "Invalid color" in said.text  # noqa: E731


@dataclass
class Seen:
    """What a page did while it was open."""

    console_errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def leaving(self, *allowed: str) -> list[str]:
        """Requests for anything but data, blobs and addresses that start as allowed."""
        fine = ("data:", "blob:", "about:", *allowed)
        return [url for url in self.requests if not url.startswith(fine)]


def require_browser() -> str:
    """Path of the browser; without one the test is skipped, or fails if it must not be."""
    reason = ""
    path = find_browser()
    if path is None:
        reason = "no Chromium or Chrome on the PATH (apt-get install chromium)"
    else:
        try:
            import playwright.sync_api  # noqa: F401
        except ImportError:
            reason = "the playwright package is not installed (pip install -e '.[test]')"
    if reason:
        if os.environ.get("DLRM_REQUIRE_BROWSER") == "1":
            pytest.fail(f"DLRM_REQUIRE_BROWSER is 1, but {reason}")
        pytest.skip(reason)
    assert path is not None
    return path


_running: list[Any] = []
"""The browser that pages are opened in: none, or one."""


@contextmanager
def open_browser() -> Iterator[Any]:
    """The browser that is running, else one that runs until the end of the block.

    Starting one takes longer than most pages do.
    """
    from playwright.sync_api import sync_playwright

    if _running:
        yield _running[0]
        return
    path = require_browser()
    with sync_playwright() as playwright:
        _running.append(playwright.chromium.launch(executable_path=path, args=FLAGS))
        try:
            yield _running[0]
        finally:
            _running.pop().close()


@contextmanager
def open_page(url: str, *allowed: str, **settings: Any) -> Iterator[tuple[Any, Seen]]:
    """A page that remembers nothing, offline except for addresses that start as allowed.

    Args:
        url: what to open, a ``file://`` address or one of a local server.
        allowed: starts of addresses that may be asked for besides ``url`` itself.
        settings: of the browser context, such as ``color_scheme="dark"``.
    """
    seen = Seen()

    def decide(route: Any) -> None:
        address = route.request.url
        if seen_fine(address):
            route.continue_()
        else:
            route.abort()

    def seen_fine(address: str) -> bool:
        return address == url or address.startswith(("data:", "blob:", *allowed))

    with open_browser() as running:
        context = running.new_context(**{"viewport": {"width": 1400, "height": 900}, **settings})
        page = context.new_page()
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda said: WRONG(said) and seen.console_errors.append(said.text))
        page.on("pageerror", lambda error: seen.console_errors.append(str(error)))
        context.route("**/*", decide)
        page.add_init_script(RESERVE)
        try:
            page.goto(url)
            yield page, seen
        finally:
            context.close()


# What a page keeps free for each figure before it is drawn, and what a drawn one takes.
RESERVE = """document.addEventListener("DOMContentLoaded", () => {
  window.reserved = [...document.querySelectorAll("figure .plot")]
    .map((place) => parseFloat(place.style.minHeight));
});"""
GROWN = """() => [...document.querySelectorAll("figure .plot")]
  .map((place, at) => [at, window.reserved[at], place.offsetHeight])
  .filter(([, kept, taken]) => !(Math.abs(taken - kept) <= 2))"""


def wait_for_marks(page: Any, figures: int, timeout_s: float = 30.0) -> None:
    """Wait until that many figures are there and each has drawn marks."""
    drawn: list[bool] = []
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        drawn = page.evaluate(DRAWN)
        if len(drawn) == figures and all(drawn):
            return
        page.wait_for_timeout(300)
    raise AssertionError(f"expected {figures} figures with marks, found {drawn}")


def open_folds(page: Any) -> None:
    """Open whatever a page has folded: figures are drawn once they are seen."""
    page.evaluate("() => document.querySelectorAll('details').forEach((fold) => fold.open = true)")


PHONE: dict[str, Any] = {"color_scheme": "dark", "viewport": {"width": 420, "height": 900}}
"""Settings of a phone's page, in the dark."""


def check_drawn(page: Any, seen: Seen, figures: int | None = None) -> None:
    """Open all folds of a page; assert what :func:`check_page` does, in this one window."""
    open_folds(page)
    expected = page.locator("figure .plot").count()
    if figures is not None:
        assert expected == figures
    wait_for_marks(page, expected)
    grown = page.evaluate(GROWN)
    assert grown == [], f"drawing figures of {page.url} moved what is below: {grown}"
    overflow = page.evaluate(
        "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0, f"{page.url} is {overflow} px too wide in {page.viewport_size}"
    assert seen.console_errors == [], seen.console_errors
    assert seen.leaving(page.url) == []


def check_page(html: Path, *, figures: int | None = None) -> None:
    """Assert that a page draws all its figures, reports no error, and asks for nothing."""
    url = html.resolve().as_uri()
    with open_browser():
        for settings in ({"color_scheme": "light"}, PHONE):
            with open_page(url, **settings) as (page, seen):
                check_drawn(page, seen, figures)


@contextmanager
def jupyter_lab(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """A JupyterLab of its own settings on a free port: address, token, and its root folder."""
    require_browser()
    root = folder / "root"
    root.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    settings = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "RUNTIME")}
    # no question about news in front of the notebook
    news = folder / "settings" / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)
    (news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    log = (folder / "lab.log").open("w+")
    server = subprocess.Popen(
        [
            sys.executable,
            *("-m", "jupyterlab", "--no-browser", "--allow-root"),
            "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={port}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={root}",
            f"--LabApp.workspaces_dir={folder / 'workspaces'}",
            f"--LabApp.user_settings_dir={folder / 'settings'}",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            "--LabApp.news_url=",
            "--LabApp.extension_manager=readonly",
            # a kernel ends soon after its page is closed
            "--MappingKernelManager.cull_idle_timeout=10",
            "--MappingKernelManager.cull_interval=5",
        ],
        # the token goes by the environment: arguments can be read by every user
        env=os.environ | settings | {"JUPYTER_TOKEN": token, "PYTHONPATH": str(REPOSITORY)},
        stdout=log,
        stderr=log,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"{address}/api"):
            assert server.poll() is None and time.monotonic() < deadline, _read(log)
            time.sleep(0.3)
        yield address, token, root
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return "version" in json.load(reply)
    except (OSError, urllib.error.URLError):
        return False


def _read(log) -> str:
    log.seek(0)
    return log.read()
