"""`speedlab bench disk`: states on disk beside fio with the same chunk, transfers at a time, bytes and O_DIRECT.

Both write and read one file of their own in the same folder, in turn. fio keeps as many transfers under way as ours, by
one thread with libaio, or by as many threads as ours has (psync), each with its part of the file; its start is not
counted. Ours is a whole turn: into memory that an update would work on, and back.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from speedlab.calibrate.interleave import Times, row, take_turns
from speedlab.calibrate.table import report
from speedlab.config.cli_options import read_options

if TYPE_CHECKING:
    from speedlab.offload import DiskStore, OffloadedState

_ENGINES = ("libaio", "psync")
_NO_FIO = "fio is not installed, so there is nothing beside ours: apt-get install fio"


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """Bytes a second of states on disk, written and read, beside fio."""

    folder: Path = Path(tempfile.gettempdir())
    """On the disk that is to be measured."""
    megabytes: int = 1024
    """Size of the state."""
    threads: int | None = None
    """Transfers at a time; None: as measured to be best here."""
    chunk_kib: int | None = None
    """Size of a transfer; None: as measured to be best here."""
    rounds: int = 8
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    options = read_options(DiskOptions, argv, "speedlab bench disk")
    import torch

    from speedlab.comm import CommStats
    from speedlab.offload import DiskStore, measure_disk

    best = measure_disk(options.folder)
    threads = options.threads or best.threads
    chunk_bytes = best.chunk_bytes if options.chunk_kib is None else options.chunk_kib << 10
    whole = chunk_bytes * threads  # So that each thread of fio has as many chunks.
    nbytes = max(1, options.megabytes * 10**6 // whole) * whole
    store = DiskStore(
        options.folder,
        rank=0,
        traffic=CommStats(),
        device=torch.device("cpu"),
        threads=threads,
        chunk_bytes=chunk_bytes,
    )
    with tempfile.TemporaryDirectory(prefix="speedlab-fio-", dir=options.folder) as folder:
        try:
            peer = _Fio(Path(folder) / "file", nbytes, chunk_bytes, threads, store.file.direct) if _has_fio() else None
            times = _measure(store, nbytes, peer, options.rounds)
        finally:
            store.close()
    case = (
        f"{nbytes / 1e6:,.0f} MB, {threads} × {chunk_bytes >> 10} KiB, {'O_DIRECT' if store.file.direct else 'cached'}"
    )
    names = [] if peer is None else [f"fio {engine}" for engine in _ENGINES]
    rows = [
        row(
            f"{way}, {case}",
            {name: times[f"{name} {way}"] for name in ("ours", *names)},
            peer=peer_name,
            unit="MB/s",
            value=lambda seconds: nbytes / seconds / 1e6,
        )
        for way in ("write", "read")
        for peer_name in names or ("",)
    ]
    report(rows, options.json)
    if peer is None:
        print(_NO_FIO, file=sys.stderr)


def _measure(store: DiskStore, nbytes: int, peer: _Fio | None, rounds: int) -> Times:
    """Seconds by who and what was done."""
    import torch

    kept = store.keep(nbytes, torch.uint8)
    kept.fetch(values=False).wait()
    noise = torch.frombuffer(bytearray(os.urandom(1 << 20)), dtype=torch.uint8)  # Some disks are faster with zeros.
    kept.tensor.copy_(noise.repeat(nbytes // noise.numel() + 1)[:nbytes])
    kept.leave(changed=True)
    acts = {"ours write": lambda: _write(store, kept), "ours read": lambda: _read(kept)}
    if peer is not None:
        for engine in _ENGINES:
            acts |= {f"fio {engine} {way}": partial(peer.run, engine, way) for way in ("write", "read")}
        peer.run("libaio", "write")  # Makes its file.
    take_turns(list(acts), 1, lambda name: acts[name]())  # For warming up.
    return take_turns(list(acts), rounds, lambda name: acts[name]())


def _write(store: DiskStore, kept: OffloadedState) -> float:
    kept.fetch().wait()
    start = time.perf_counter()
    kept.leave(changed=True)
    store.flush()
    return time.perf_counter() - start


def _read(kept: OffloadedState) -> float:
    start = time.perf_counter()
    kept.fetch().wait()
    seconds = time.perf_counter() - start
    kept.leave(changed=False)
    return seconds


def _has_fio() -> bool:
    return shutil.which("fio") is not None


@dataclass(frozen=True)
class _Fio:
    """fio over one file of its own."""

    file: Path
    nbytes: int
    chunk_bytes: int
    depth: int
    direct: bool

    def run(self, engine: str, way: str) -> float:
        """Seconds that it took to "write" or "read" all of the file, as fio says."""
        command = [
            "fio", "--name=states", f"--filename={self.file}", f"--filesize={self.nbytes}", f"--bs={self.chunk_bytes}",
            f"--rw={way}", f"--direct={int(self.direct)}", f"--ioengine={engine}", "--thread", "--group_reporting",
            "--output-format=json",
        ]  # fmt: skip
        if engine == "libaio":
            command += [f"--iodepth={self.depth}", f"--io_size={self.nbytes}"]
        else:
            part = self.nbytes // self.depth
            command += [f"--numjobs={self.depth}", f"--offset_increment={part}", f"--size={part}"]
        if not self.direct and way == "write":
            command.append("--sync=dsync")  # Ours writes through, too.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"speedlab bench disk: fio failed ({done.returncode}): {done.stderr or done.stdout}")
        # Where it warns, it does so before the JSON.
        figures = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]
        return figures["io_bytes"] / figures["bw_bytes"]
