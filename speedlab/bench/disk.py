"""Compare states on disk with fio: `speedlab bench disk`.

1. Both use the same chunk size, number of concurrent transfers, bytes and O_DIRECT setting.
2. Both write and read one file of their own in the same folder, in turn.
3. fio keeps the same number of transfers in flight: one thread with libaio, or as many threads as ours (psync), each
   with its part of the file. The start of fio is not counted.
4. Ours is a full round trip: into the memory that an update would use, and back.
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
from speedlab.config.command_line import read_options

if TYPE_CHECKING:
    from speedlab.offload import DiskStore, OffloadedState

_ENGINES = ("libaio", "psync")
_NO_FIO = "fio is not installed, so there is nothing to compare with: apt-get install fio"


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """Bytes a second of states on disk, written and read, compared with fio."""

    folder: Path = Path(tempfile.gettempdir())
    """A folder on the disk to measure."""
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
    """Run `speedlab bench disk` and print the table.

    Args:
        argv: command-line arguments; None means those of the process.
    """
    options = read_options(DiskOptions, argv, "speedlab bench disk")
    import torch

    from speedlab.comm import CommStats
    from speedlab.offload import DiskStore, measure_disk

    best = measure_disk(options.folder)
    threads = options.threads or best.threads
    chunk_bytes = best.chunk_bytes if options.chunk_kib is None else options.chunk_kib << 10
    whole = chunk_bytes * threads  # Each thread of fio then has the same number of chunks.
    # Round to whole chunks for every thread.
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
    """Return seconds by contestant and direction, for instance "ours write"."""
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
        peer.run("libaio", "write")  # Create fio's file, so that the first read finds it.
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
    """fio with one file of its own."""

    file: Path
    nbytes: int
    chunk_bytes: int
    depth: int
    direct: bool

    def run(self, engine: str, way: str) -> float:
        """Run fio over the whole file and return the seconds that fio reports.

        Args:
            engine: fio's ioengine, "libaio" or "psync".
            way: "write" or "read".

        Raises:
            SystemExit: fio failed.
        """
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
            command.append("--sync=dsync")  # Our store writes through to the disk as well.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"speedlab bench disk: fio failed ({done.returncode}): {done.stderr or done.stdout}")
        # fio prints warnings before the JSON.
        figures = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]
        return figures["io_bytes"] / figures["bw_bytes"]
