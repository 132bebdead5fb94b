"""Parts of the server's side that need no server."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from speedlab_server.output import MOST_BYTES, output_of
from speedlab_server.problems import QuestionError, told
from speedlab_server.typescript import typescript

from speedlab.cluster.known_runs import note_seen, seen_runs
from speedlab.telemetry.folder import RunFolderError

ROOT = Path(__file__).parents[2]


def test_the_typescript_is_that_of_the_messages() -> None:
    written = (ROOT / "extension/lab/src/messages.ts").read_text(encoding="utf-8")
    assert written == typescript(), "run: python -m speedlab_server.typescript > extension/lab/src/messages.ts"
    assert "export interface Records {" in written
    assert "columns: Record<string, (number | null)[]>;" in written


def test_importing_it_starts_no_torch() -> None:
    code = "import sys, speedlab_server.handlers; print(sorted({'torch', 'numba', 'ipyparallel'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_output_since_a_place_also_when_the_file_was_put_aside(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.log"
    file.write_text("one\ntwo\nhal")
    (tmp_path / "rank-1.log").write_text("other\n")
    first = output_of(tmp_path)
    assert [(entry.rank, entry.lines, entry.skipped) for entry in first.ranks] == [
        (0, ["one", "two"], False),
        (1, ["other"], False),
    ]
    with open(file, "a") as more:
        more.write("f\nlast of it\n")
    file.rename(tmp_path / "rank-0.log.1")
    file.write_text("of the new one\n")
    second = output_of(tmp_path, after=first.cursor)
    assert [(entry.rank, entry.lines, entry.skipped) for entry in second.ranks] == [
        (0, ["half", "last of it", "of the new one"], False)
    ]
    assert output_of(tmp_path, after=second.cursor).ranks == []


def test_output_is_filtered_and_bounded(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank}.log").write_text(f"Loss of <b>{rank}</b>\nnothing\n")
    found = output_of(tmp_path, ranks=[1, 2], match="loss OF")
    assert [(entry.rank, entry.lines) for entry in found.ranks] == [
        (1, ["Loss of <b>1</b>"]),
        (2, ["Loss of <b>2</b>"]),
    ]
    (tmp_path / "rank-0.log").write_text("".join(f"line {number}\n" for number in range(50_000)))
    (only,) = output_of(tmp_path, ranks=[0]).ranks
    assert only.skipped
    assert only.lines[-1] == "line 49999"
    assert 0.9 * MOST_BYTES < sum(len(line) + 1 for line in only.lines) <= MOST_BYTES
    assert output_of(tmp_path / "none").ranks == []
    for cursor in ("x", '{"0": "/etc/passwd"}'):
        with pytest.raises(QuestionError, match="no cursor"):
            output_of(tmp_path, after=cursor)


def test_what_goes_wrong_has_a_status_and_says_what_to_do() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/runs/a/config.json")
    wrapped = RunFolderError("cannot be read")
    wrapped.__cause__ = denied
    for error in (denied, wrapped):
        assert told(error) == (
            403,
            "/runs/a/config.json may not be read by the user that runs this Jupyter server; give it the right to",
        )
    assert told(OSError(errno.EIO, "Input/output error", "/runs/a")) == (
        422,
        "/runs/a cannot be read: Input/output error; look at it, and try again",
    )
    assert told(KeyError("ours")) is None


def test_the_registry_keeps_the_newest_first_and_survives_damage(tmp_path: Path) -> None:
    for name in ("a", "b", "a"):
        note_seen(tmp_path, Path(f"/runs/{name}"))
    assert seen_runs(tmp_path) == [Path("/runs/a"), Path("/runs/b")]
    (tmp_path / ".runs-seen.json").write_text("{")
    assert seen_runs(tmp_path) == []
    note_seen(tmp_path, Path("/runs/c"))
    assert seen_runs(tmp_path) == [Path("/runs/c")]
