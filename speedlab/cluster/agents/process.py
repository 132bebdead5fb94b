"""Process of an agent: `python -m speedlab.cluster.agents.process`, one per host, started over SSH, by Slurm or by MPI.

1. *Begin*: read the order (from stdin, or from a file that all hosts see). Check that Python, torch and SpeedLab have
   the cluster's versions, and that the controller can be reached. An error is one sentence, on stdout and in a file
   next to the order; nothing is started then.
2. Make the folder of this host, readable by its user only: connection file, logs, `generation` of the rendezvous.
3. *Serve*: become an ipyparallel engine that runs the functions of `tasks.py`. The process executes itself again, so
   that its environment holds the token of the cluster, by which processes are found.
4. After the controller is gone for good, end the engines of this host, remove the folder, and exit.

The process never imports torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import speedlab.cluster.agents.tasks as agent_tasks
import speedlab.cluster.files.processes as processes
from speedlab.network import Endpoint, try_to_reach


@dataclass(frozen=True, kw_only=True)
class Order:
    """What an agent receives at its start."""

    cluster: str
    token: str
    connection: dict[str, Any]
    """Connection of an engine to the controller: addresses, ports and keys."""
    controller: str
    """Endpoint of the controller."""
    expected: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of packages that must be the same on this host."""
    name: str = ""
    """Name of the host; "" for its own name."""
    device: str = "auto"
    """'cuda', 'cpu' or 'auto'."""
    engines: int = 0
    """Number of engines on the host; 0 for one per device, or if it is not known yet."""
    end: bool = False
    """Whether only to end what runs of the cluster on this host."""

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Return the order in `text`; unknown fields are ignored."""
        data = json.loads(text)
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})

    def to_json(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self))


def own_versions() -> dict[str, str]:
    """Return the installed versions that must agree on all hosts."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "speedlab"):
        with suppress(importlib.metadata.PackageNotFoundError):
            # '2.13.0+cpu' and '2.13.0+cu130' are the same torch, built for other devices.
            versions[name] = importlib.metadata.version(name).partition("+")[0]
    return versions


def problem_here(order: Order, host: str) -> str | None:
    """Return why no agent can run here, as one sentence; None if it can.

    Args:
        order: Order of the agent.
        host: Name of this host.
    """
    own = own_versions()
    for name, version in order.expected.items():
        if own.get(name) != version:
            what = "Python" if name == "python" else name
            has = f"{what} {own[name]}" if name in own else f"no {what}"
            return (
                f"{host} has {has} in {sys.executable}, the cluster {what} {version}; all hosts need the same: install "
                f"it there, or name another interpreter"
            )
    blocked = try_to_reach(Endpoint.parse(order.controller), host)
    return f"{blocked}. Agents and engines connect to the controller there" if blocked else None


def main() -> None:
    """Run `begin`, or `serve` if a folder was given."""
    parser = argparse.ArgumentParser(prog="python -m speedlab.cluster.agents.process")
    parser.add_argument("--order", help="file with the order, which all hosts see; by default it comes on stdin")
    parser.add_argument("--detach", action="store_true", help="go on in the background; the answer is one line of JSON")
    parser.add_argument("--serve", help="folder that `begin` has made")
    parser.add_argument("--device", default="auto", help="of the engines that are going to be asked for")
    parser.add_argument("--engines", type=int, default=0, help="how many; 0: one for each device")
    given = parser.parse_args()
    if given.serve:
        serve(Path(given.serve), given.engines or None, given.device)
    else:
        sys.exit(begin(Path(given.order) if given.order else None, detach=given.detach))


def begin(file: Path | None, *, detach: bool) -> int:
    """Run steps 1 and 2, and start step 3.

    Args:
        file: File with the order; None for stdin.
        detach: Whether to serve in a background process.

    Returns:
        The exit status; does not return without `detach` if the agent starts.
    """
    try:
        text = file.read_text() if file else sys.stdin.read()
    except OSError as error:
        print(f"{platform.node()} does not see {file} ({error.strerror}); the home folder must be shared", flush=True)
        return 3
    if not text:
        if file is None:  # The caller disconnected without an order.
            return 3
        problem = (
            f"{platform.node()} sees {file} empty; its home folder is not up to date with the machine that wrote it"
        )
        print(problem, flush=True)
        (file.parent / f"problem-{platform.node()}").write_text(problem)
        return 3
    order = Order.from_json(text)
    host = order.name or platform.node()
    if order.end:
        own = (processes.ENGINE_MODULE, processes.NURSERY_MODULE, "speedlab.cluster.agents.process")
        here = processes.of_host(order.token, own)
        processes.end([found for found in here if found.pid != os.getpid()], patience_seconds=0.0)
        shutil.rmtree(folder_of(order, host), ignore_errors=True)
        print(json.dumps({"pid": 0}), flush=True)
        return 0
    problem = problem_here(order, host)
    if problem:
        print(json.dumps({"problem": problem}), flush=True)
        if file:
            (file.parent / f"problem-{host}").write_text(problem)
        return 3
    folder = make_folder(order, host)
    environment = {
        **os.environ,
        processes.TOKEN: order.token,
        "IPP_CLUSTER_ID": order.cluster,
        "IPP_PROFILE_DIR": str(folder),
        agent_tasks.HOST: host,
        agent_tasks.CONTROLLER: order.controller,
    }
    command = [sys.executable, "-m", "speedlab.cluster.agents.process", "--serve", str(folder)]
    command += [f"--device={order.device}", f"--engines={order.engines}"]
    if not detach:
        # The system shows the environment with which a process was executed, so execute again with the token.
        os.execve(sys.executable, command, environment)
    with (folder / "log" / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    print(json.dumps({"pid": process.pid}), flush=True)
    return 0


def folder_of(order: Order, host: str) -> Path:
    """Return the folder of this host.

    Args:
        order: Order of the agent.
        host: Name of this host.
    """
    return Path(tempfile.gettempdir()) / f"speedlab-{os.getuid()}-{order.token[:12]}-{host}"


def make_folder(order: Order, host: str) -> Path:
    """Make the folder of this host and write the connection file.

    Args:
        order: Order of the agent.
        host: Name of this host.

    Raises:
        OSError: If another user owns a folder of this name.
    """
    folder = folder_of(order, host)
    folder.mkdir(mode=0o700, exist_ok=True)
    # The path in the shared temporary folder is predictable, so another user may have made it.
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    for name in ("security", "log", "rendezvous"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    connection = folder / "security" / f"ipcontroller-{order.cluster}-engine.json"
    with suppress(FileNotFoundError):
        connection.unlink()
    with os.fdopen(os.open(connection, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(order.connection, file)
    return folder


def serve(folder: Path, engines: int | None, device: str) -> None:
    """Run steps 3 and 4.

    Args:
        folder: Folder of this host.
        engines: Number of engines that will be requested; None for one per device. Torch is imported for them
            meanwhile.
        device: 'cuda', 'cpu' or 'auto'.
    """
    os.environ["IPP_CONNECTION_INFO"] = next((folder / "security").glob("*-engine.json")).read_text()
    agent_tasks.begin(folder, time.time())
    agent_tasks.expect(engines, device)
    from ipyparallel.engine.app import IPEngine

    # No nanny process: signals are for engines, never for the agent in the middle of a message.
    sys.argv[1:] = [
        f"--profile-dir={folder}",
        "--log-level=WARN",
        "--HistoryManager.enabled=False",
        "--InteractiveShell.cache_size=0",
        "--IPEngine.enable_nanny=False",
        agent_tasks.misses(2 * agent_tasks.SILENT_SECONDS),
        "--IPEngine.timeout=30",
    ]
    try:
        IPEngine.launch_instance()
    finally:
        agent_tasks.end_here()


if __name__ == "__main__":
    main()
