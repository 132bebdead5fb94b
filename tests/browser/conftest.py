"""A real JupyterLab server and a real Chromium, isolated from the person's own configuration."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speedlab.network import free_port

_CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_START_SECONDS = 60
STOP_ENGINES = """
from speedlab.cluster import Cluster, ClusterError
try:
    Cluster.attach().stop()
except ClusterError as error:
    print(error)
"""


_SEEN = """() => {
    const at = document.activeElement;
    const parts = [...document.querySelectorAll('.sl-panel-widget, .jp-Dialog, .jp-NotebookPanel')];
    const text = parts.map(part => part.innerText.slice(0, 1500)).join('\\n--\\n');
    return `${location.href}\\nthe focus: ${at.tagName} ${at.className} ${at.getAttribute('aria-label')}\\n${text}`;
}"""


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address, token, and the folder it serves."""

    url: str
    token: str
    folder: Path
    environment: dict[str, str]

    def page_of(self, notebook: str, *, seven: bool = False) -> str:
        """In JupyterLab, or in Notebook 7."""
        return f"{self.url}/{'notebooks' if seven else 'lab/tree'}/{notebook}?token={self.token}&reset"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a free port, with configuration, runtime and IPython directories of its own."""
    root = tmp_path_factory.mktemp("lab")
    folder = root / "work"
    folder.mkdir()
    own = {
        "IPYTHONDIR": root / "ipython",
        **{f"JUPYTER_{kind}_DIR": root / kind.lower() for kind in ("CONFIG", "DATA", "RUNTIME")},
    }
    environment = {**os.environ, **{name: str(path) for name, path in own.items()}, "PYTHONWARNINGS": "ignore"}
    # The language packs' and news extensions ask the network; a test has none.
    settings = root / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    port, token = free_port(), secrets.token_hex(16)
    log = (root / "lab.log").open("w")
    server = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "jupyter",
                "lab",
                "--no-browser",
                "--allow-root",
                "--ip=127.0.0.1",
                f"--port={port}",
            ),
            *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"),
            f"--LabApp.user_settings_dir={root / 'config' / 'lab' / 'user-settings'}",
            f"--LabApp.extra_labextensions_path={_own_pages(root)}",
        ],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/api?token={token}", server, root / "lab.log")
        yield Lab(url, token, folder, environment)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


@pytest.fixture
def _engines_end(lab: Lab) -> Iterator[None]:
    """Whatever the test did, its engines are ended."""
    yield
    subprocess.run([sys.executable, "-c", STOP_ENGINES], env=lab.environment, cwd=lab.folder, timeout=90, check=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure shows what was on the page."""
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if page is not None and report.when == "call" and report.failed:
        try:
            report.sections.append(("page", page.evaluate(_SEEN)))
        except Exception as error:
            report.sections.append(("page", f"it cannot be asked: {error}"))
        report.sections.append(("requests that failed", "\n".join(item.funcargs["failed_requests"]) or "none"))
    return report


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium from the system. Ends with the module: while it runs, this thread has a running event loop."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine; .ci/run installs it")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=_CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def failed_requests() -> list[str]:
    """Of the test's page, each with its reason."""
    return []


@pytest.fixture
def page(browser, failed_requests):
    """A fresh page of a size that shows a notebook and a dashboard."""
    page = browser.new_page(viewport={"width": 1500, "height": 1700})
    page.set_default_timeout(60_000)
    page.on("requestfailed", lambda request: failed_requests.append(f"{request.failure}: {request.url}"))
    yield page
    page.close()


def _own_pages(root: Path) -> Path:
    """A folder of extensions with the checkout's own build, whatever the environment has installed."""
    folder = root / "labextensions"
    folder.mkdir()
    (folder / "speedlab").symlink_to(Path(__file__).parents[2] / "extension" / "lab" / "labextension")
    return folder


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with {server.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.1)  # Between two looks, bounded by the deadline.
    raise TimeoutError(f"JupyterLab did not answer in {_START_SECONDS} s:\n{log.read_text()[-3000:]}")
