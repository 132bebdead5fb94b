"""A notebook in a real JupyterLab and Chromium: how long until the first loss is on the screen."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speedlab.network import free_port

CELLS = (
    "%load_ext speedlab\n%speedlab start",
    "from speedlab.config import RunConfig\nrun = cluster.train(RunConfig(model='gpt-tiny', data='stdlib', zero=2))",
    "%speedlab dash",
)
"""Three actions: each cell is run as soon as the one before it is done."""
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_COUNT_FRAMES = """() => new Promise(done => {
  let frames = 0; const began = performance.now();
  const next = now => {
    frames += 1;
    if (now - began < 3000) requestAnimationFrame(next);
    else done(1000 * frames / (now - began));
  };
  requestAnimationFrame(next);
})"""


def why_not() -> str:
    """Why no browser can be driven here; empty where one can."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install playwright)"
    return "" if _chromium() else "there is no Chromium on this machine"


def first_loss() -> tuple[float, float]:
    """(seconds from the first action to the first loss point, frames a second while the run is followed)."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as root, _lab(Path(root)) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_chromium(), args=list(_FLAGS))
        try:
            page = browser.new_page(viewport={"width": 1500, "height": 1400})
            page.set_default_timeout(120_000)
            page.goto(url)
            page.get_by_text("| Idle").first.wait_for()
            began = time.perf_counter()
            for number in range(len(CELLS)):
                _run_cell(page, number, wait=number < len(CELLS) - 1)
            page.locator('[data-plot="loss"] .scatterlayer path.point, [data-plot="loss"] .js-line').first.wait_for(
                state="attached"
            )
            seconds = time.perf_counter() - began
            frames = page.evaluate(_COUNT_FRAMES)
            _stop(page)
        finally:
            browser.close()
    return seconds, frames


def _run_cell(page: Any, number: int, *, wait: bool) -> None:
    cell = page.locator(".jp-Notebook-cell").nth(number)
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Shift+Enter")
    if wait:
        cell.locator(".jp-InputPrompt", has_text=f"[{number + 1}]:").wait_for()


def _stop(page: Any) -> None:
    """End the engines that the notebook started."""
    cell = page.locator(".jp-Notebook-cell").nth(len(CELLS))
    cell.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Shift+Enter")
    cell.locator(".jp-InputPrompt", has_text=f"[{len(CELLS) + 1}]:").wait_for()


@contextmanager
def _lab(root: Path) -> Iterator[str]:
    """The address of a notebook with CELLS, in a JupyterLab of its own."""
    code = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": cell}
        for i, cell in enumerate((*CELLS, "cluster.stop()"))
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (root / "first.ipynb").write_text(json.dumps(notebook))
    own = {f"JUPYTER_{kind}_DIR": str(root / f".{kind.lower()}") for kind in ("RUNTIME", "CONFIG")}
    environment = {**os.environ, **own, "IPYTHONDIR": str(root / ".ipython")}
    port = free_port()
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
    command += [f"--port={port}", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={token}")
        yield f"http://127.0.0.1:{port}/lab/tree/first.ipynb?token={token}&reset"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError("JupyterLab did not answer within 60 s") from None
            time.sleep(0.1)


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
