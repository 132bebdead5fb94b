"""`python -m tests.benchmarks page`: what pages cost, seen from outside: a Jupyter server, and a browser where there is
one."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from speedlab.calibrate.table import BenchRow, report
from speedlab.config.command_line import read_options
from speedlab.config.errors import ConfigError
from speedlab.telemetry.records import RunState
from speedlab.telemetry.run_folder import RunFolder, Status
from tests.benchmarks.page_lab import first_loss, why_not
from tests.benchmarks.reading import add_step, write_run

GOALS = {
    "bundle": ("KB", 150.0),
    "open": ("s", 1.0),
    "server": ("MB", 150.0),
    "wire": ("KB/s", 20.0),
    "tick": ("ms", 1.0),
    "first loss": ("s", 10.0),
}
"""At most: the extension without plotly; until a long run's figures are there; what the server takes for it; what goes
to the page; the server's processor time for a look at the run (to a hundredth of a second in all, and of a page that
compresses nothing), beyond what it takes anyway; from the first action in an open notebook to the first loss point on
screen."""
FRAMES = 30.0
"""At least: frames a second of a page that follows a run."""
TOKEN = "of-a-bench"
_START_SECONDS = 60.0
_SETTLE_SECONDS = 4.0
"""Jupyter's server answers before its other extensions have looked around."""
_IDLE_SECONDS = 5.0
"""For which it is measured what the server takes when no page looks."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What it takes to look at a run through Jupyter's server."""

    ranks: int = 64
    """Of the long run."""
    steps: int = 10_000
    """Of each rank."""
    seconds: float = 10.0
    """For which the long run is followed, with ten new steps a second."""
    rounds: int = 3
    """Of the first loss, each in a new notebook with new engines."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks page")
    if importlib.util.find_spec("websocket") is None:
        raise ConfigError("python -m tests.benchmarks page needs Jupyter's server: pip install 'speedlab[notebook]'")
    found: dict[str, list[float]] = {"bundle": [bundle_bytes() / 1e3]}
    with tempfile.TemporaryDirectory() as root:
        folder = write_run(Path(root) / "runs", options.ranks, options.steps)
        folder.write_status(Status(state=RunState.RUNNING, step=options.steps, steps=2 * options.steps))
        with jupyter_server(Path(root)) as (process, port):
            found |= _follow(process, port, folder, options)
    frames: list[float] = []
    if not (reason := why_not()):
        found["first loss"] = []
        for _ in range(options.rounds):
            seconds, rate = first_loss()
            found["first loss"].append(seconds)
            frames.append(rate)
    rows = [
        BenchRow(case=what, ours=_median(values), unit=GOALS[what][0], n=len(values)) for what, values in found.items()
    ]
    rows += [BenchRow(case="frames", ours=_median(frames), unit="1/s", n=len(frames))] if frames else []
    report(rows, options.json)
    for row in rows:
        good = row.ours >= FRAMES if row.case == "frames" else row.ours <= GOALS[row.case][1]
        goal = f"at least {FRAMES:g}" if row.case == "frames" else f"at most {GOALS[row.case][1]:g}"
        print(f"{row.case}: {row.ours:.4g} {row.unit}, {goal}: {'met' if good else 'MISSED'}")
    if reason:
        print(f"first loss and frames were not measured: {reason}")


def bundle_bytes() -> int:
    """Of the extension as it is installed, but for plotly, which a page loads when it draws for the first time."""
    from jupyter_core.paths import jupyter_path

    folders = [Path(path) / "speedlab" / "static" for path in jupyter_path("labextensions")]
    static = next((folder for folder in folders if folder.exists()), None)
    if static is None:
        raise ConfigError("JupyterLab has no extension of SpeedLab here; `make pages` builds and installs it")
    scripts = [path.read_bytes() for path in static.glob("*.js")]
    return sum(len(script) for script in scripts if b"plotly.js-style-" not in script)


@contextmanager
def jupyter_server(root: Path) -> Iterator[tuple[psutil.Process, int]]:
    """(its process, its port): a server with SpeedLab's extension and nothing else, in a folder of its own."""
    own = {f"JUPYTER_{kind}_DIR": str(root / f".{kind.lower()}") for kind in ("RUNTIME", "CONFIG", "DATA")}
    environment = {**os.environ, **own, "IPYTHONDIR": str(root / ".ipython")}
    extensions = "{'speedlab_server': True, 'jupyterlab': False, 'ipyparallel': False}"
    command = [sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.jpserver_extensions={extensions}", f"--IdentityProvider.token={TOKEN}"]
    process = subprocess.Popen(
        [*command, f"--ServerApp.root_dir={root}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield psutil.Process(process.pid), listening_port(process, root / ".runtime")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listening_port(process: subprocess.Popen[bytes], runtime: Path) -> int:
    """Where a Jupyter server listens whose JUPYTER_RUNTIME_DIR is `runtime`: it says where a moment before it does.
    Raises ConfigError where it has ended, or is not there after a minute."""
    info, deadline = runtime / f"jpserver-{process.pid}.json", time.monotonic() + _START_SECONDS
    while True:
        with suppress(OSError, ValueError):  # The file is not there or not whole yet, or nobody listens.
            port = json.loads(info.read_text())["port"]
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return port
        if process.poll() is not None or time.monotonic() > deadline:
            raise ConfigError("Jupyter's server did not start; try `jupyter server` by hand")
        time.sleep(0.02)


def _follow(process: psutil.Process, port: int, folder: RunFolder, options: Options) -> dict[str, list[float]]:
    """Open the run as a page does, and hear of its steps."""
    import websocket

    from speedlab.cluster.known_runs import run_id

    before = process.memory_info().rss
    way = f"ws://127.0.0.1:{port}/speedlab/api/runs/{run_id(folder.path)}/drawing?token={TOKEN}"
    began = time.perf_counter()
    page = websocket.create_connection(way, timeout=60)
    page.send(json.dumps({"type": "Draw", "version": 1, "watching": True}))
    while "figures" not in _head(page.recv()):
        pass
    opened = time.perf_counter() - began
    page.send(json.dumps({"type": "Draw", "version": 1, "watching": False}))
    time.sleep(_SETTLE_SECONDS)
    taken, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
    time.sleep(_IDLE_SECONDS)
    idle = (sum(process.cpu_times()[:2]) - cpu) / _IDLE_SECONDS
    page.send(json.dumps({"type": "Draw", "version": 1, "watching": True}))
    cpu = sum(process.cpu_times()[:2])
    writer = threading.Thread(target=_report_steps, args=(folder, options))
    writer.start()
    got, frames, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < options.seconds:
        got, frames = got + len(page.recv()), frames + 1
    seconds, used = time.perf_counter() - began, sum(process.cpu_times()[:2]) - cpu
    writer.join()
    page.close()
    ticks = {"tick": [(used - idle * seconds) / frames * 1e3]} if frames else {}
    return {"open": [opened], "server": [(taken - before) / 1e6], "wire": [got / seconds / 1e3], **ticks}


def _report_steps(folder: RunFolder, options: Options) -> None:
    due = time.perf_counter()
    for step in range(options.steps + 1, options.steps + 1 + int(10 * (options.seconds + 1))):
        add_step(folder.path, options.ranks, step)  # Its status is written when it changes, not with each step.
        due += 0.1
        time.sleep(max(0.0, due - time.perf_counter()))


def _head(data: str | bytes) -> dict[str, Any]:
    if isinstance(data, str):
        return json.loads(data)
    (length,) = struct.unpack_from("<I", data)
    return json.loads(data[4 : 4 + length])


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
