"""`speedlab bench disk`: rows beside fio where there is one, and what is said where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from speedlab.bench import disk
from speedlab.offload import disk_benchmark as measure_module

FIO = """#!/bin/sh
echo "$@" >> "{calls}"
echo "fio: a warning before the figures"
echo '{{"jobs": [{{"write": {{"io_bytes": 4000000, "bw_bytes": 2000000}},'
echo '            "read": {{"io_bytes": 4000000, "bw_bytes": 1000000}}}}]}}'
"""


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = measure_module.DiskSpeed(
        read_bytes_per_second=1e9, write_bytes_per_second=1e9, threads=2, chunk_bytes=1 << 20, direct=True
    )
    monkeypatch.setattr(measure_module, "_KNOWN", {tmp_path.stat().st_dev: found})


@pytest.mark.usefixtures("speed")
def test_a_row_each_way_beside_fio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, programs, rows = tmp_path / "calls", tmp_path / "bin", tmp_path / "rows.json"
    programs.mkdir()
    (programs / "fio").write_text(FIO.format(calls=calls))
    (programs / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    place = tmp_path / "disk"
    place.mkdir()
    disk.main(["--folder", str(place), "--megabytes", "5", "--rounds", "2", "--json", str(rows)])
    write, write_threads, read, read_threads = map(json.loads, rows.read_text().splitlines())
    assert write["case"].startswith("write, 4 MB, 2 × 1024 KiB")
    assert (write["peer_name"], write["n"], read["n"]) == ("fio libaio", 2, 2)
    assert (write_threads["peer_name"], read_threads["peer_name"]) == ("fio psync", "fio psync")
    assert write["peer"] == pytest.approx(4 * 2**20 / 2 / 1e6)
    assert read["peer"] == pytest.approx(4 * 2**20 / 4 / 1e6)
    asked = calls.read_text().splitlines()
    assert len(asked) == 1 + 4 + 8
    assert all(" --bs=1048576 " in line and "--filesize=4194304 " in line for line in asked)
    assert sum(" --iodepth=2 --io_size=4194304" in line for line in asked) == 7
    assert sum(" --numjobs=2 --offset_increment=2097152 --size=2097152" in line for line in asked) == 6
    assert os.listdir(place) == []
    assert "fio is not installed" not in capsys.readouterr().err


@pytest.mark.usefixtures("speed")
def test_without_fio_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk.shutil, "which", lambda name: None)
    disk.main(["--folder", str(tmp_path), "--megabytes", "4", "--rounds", "2"])
    said = capsys.readouterr()
    assert "apt-get install fio" in said.err
    assert said.out.count("MB/s") == 2
