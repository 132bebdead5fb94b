"""One Jupyter server for all tests of this tier: a real one, in a process and with folders of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_helpers import SECONDS, TOKEN, JupyterServer

from speedlab.config import ConfigError
from tests.benchmarks.page import listening_port

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
        try:
            port = listening_port(process, home)
        except ConfigError:
            pytest.fail((home / "log").read_text())
        yield JupyterServer(process, port, root, ipython)
    finally:
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
