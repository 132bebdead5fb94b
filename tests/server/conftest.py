"""One Jupyter server for all tests of this tier: a real one, in a process and with folders of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import SECONDS, TOKEN, JupyterServer

# What other tiers share of theirs; tests of this one import it also where they run alone.
sys.path.append(str(Path(__file__).parents[1] / "unit"))
sys.path.append(str(Path(__file__).parents[1] / "notebook"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    root, home, ipython = (tmp_path_factory.mktemp(name) for name in ("root", "home", "ipython"))
    (ipython / "profile_default" / "speedlab").mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    environment |= {"IPYTHONDIR": str(ipython), "JUPYTER_RUNTIME_DIR": str(home), "JUPYTER_CONFIG_DIR": str(home)}
    environment["CUDA_VISIBLE_DEVICES"] = ""  # What it starts runs on CPU cores, whatever the machine has.
    command = [sys.executable, "-m", "jupyter_server", "--allow-root", "--no-browser", "--ServerApp.base_url=/base/"]
    command += [f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={TOKEN}", "--ServerApp.ip=127.0.0.1"]
    command += ["--ServerApp.jpserver_extensions={'speedlab_server': True, 'jupyterlab': False, 'ipyparallel': False}"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command += [f"--ServerApp.port={port}"]  # Taken meanwhile, it takes another one, and says which.
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=root)
    try:
        info, deadline = home / f"jpserver-{process.pid}.json", time.monotonic() + 60
        while not info.exists() or not info.read_text():
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.02)
        while not _listens(port := json.loads(info.read_text())["port"]):  # It says where a moment before it does.
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.02)
        yield JupyterServer(process, port, root, ipython)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
