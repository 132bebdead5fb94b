"""The run folder: a run's configuration, status, control words, records and checkpoints, in one place anyone may read.

Everything in it is JSON, written by replacing or appending, never by changing in place; nothing in it is ever trusted:
sizes are bounded and every field is checked when it is read, because a folder may come from somewhere else.

A file that appears whole, and once: for numbers and keys that several processes want to give at the same time.

Files that others have written, for reading: what somebody has put in their place stops no reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from speedlab.config import ConfigError, RunConfig
from speedlab.config.errors import with_more
from speedlab.telemetry.records import Event, RunState

_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV})
"""What `link` says on file systems without hard links: exFAT, FUSE and some shared folders of virtual machines."""


def place(draft: Path, path: Path) -> None:
    """Move `draft` to `path`. Raises FileExistsError, and leaves the draft, where somebody was faster.

    Both are in one folder. Whoever reads `path` finds nothing or all of it.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _place_under_lock(draft, path)
    else:
        draft.unlink()


def _place_under_lock(draft: Path, path: Path) -> None:
    # The lock goes with the process that holds it, so that one that was killed here keeps nobody waiting.
    lock = os.open(path.parent / ".place-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        draft.rename(path)
    finally:
        os.close(lock)


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """The file at `path`. Raises OSError for what is none: a pipe would stop its reader for ever, and some
    devices never end."""
    return os.fdopen(plain_descriptor(path), "rb")


def plain_descriptor(path: str | os.PathLike[str]) -> int:
    """Likewise, for who reads with `os.pread`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # A pipe's opening would wait, too.
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


CONTROL_WORDS = ("pause", "resume", "step", "stop", "save", "reshape", "prove", "live")
"""What a person may ask of a run; each is carried out by all ranks between the same two steps."""

TOKENIZER = "tokenizer"
"""Where a run's folder has its tokenizer, as transformers reads it."""

UNSUPERVISED = "the cluster's supervisor has ended; the next client starts another one, and the run goes on"
"""Text of the status of a run that has paused by itself; who supervises its cluster next lets it go on."""

_CONFIG_LIMIT_BYTES = 2**20
_STATUS_LIMIT_BYTES = 2**18
_WORD_LIMIT_BYTES = 2**14
_KEYS_LOOKED_AT = 32
_NO_WORD: dict[str, Any] = {}
"""What reading a word gives where there is none; one that holds nothing is a damaged one."""
_PLACEMENT_BYTES = 2**28


class RunFolderError(RuntimeError):
    """A folder that is no run, holds something damaged, or cannot take what has to be written."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message says all, and the frames would be ours."""
        return [f"{type(self).__name__}: {with_more(self)}"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a run is doing, as its engines last wrote it.

    `cluster` is the name of the cluster whose engines hold it and `token` which cluster of that name; `rank_pids` are
    the engines' process ids by rank, for people; `command` is the number of the last control word carried out;
    `updated` is in seconds since the epoch and is filled in when the status is written. `unread` is never written: why
    what is here could not be read anew.
    """

    state: RunState = RunState.STARTING
    step: int = 0
    steps: int = 0
    cluster: str = ""
    token: str = ""
    rank_pids: tuple[int, ...] = ()
    command: int = 0
    text: str = ""
    updated: float = 0.0
    unread: str = ""

    @property
    def told(self) -> str:
        """What the run says of its state, and beside it what keeps that from being read."""
        return " · ".join(filter(None, (self.text, self.unread)))


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """A control word as it was posted. Numbers count up from 1 within a run."""

    number: int
    word: str
    arguments: dict[str, Any] = field(default_factory=dict)
    time: float = field(default=0.0, compare=False)
    """When, in seconds since 1970."""


class RunFolder:
    """A run's folder, opened. Raises RunFolderError when `path` holds no run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        self._config_stamp = self._stamp_of_config()
        self._unknown: list[str] = []
        """What the configuration says that this version has no field for, a sentence each."""
        self._config = self._read_config()

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> RunConfig:
        """What the run was started with, or goes on with since its number of engines was changed."""
        self._look_at_config()
        return self._config

    def _look_at_config(self) -> None:
        stamp = self._stamp_of_config()
        if stamp not in (None, self._config_stamp):
            self._config, self._config_stamp = self._read_config(), stamp

    def update_config(self, config: RunConfig) -> None:
        """Replace the configuration in one move. Only while no rank advances the run: engines read it when they build
        it. Raises RunFolderError as `require_known` does."""
        self.require_known()
        write_atomically(self.path / "config.json", config.to_json())

    def require_known(self) -> None:
        """Raise RunFolderError where the configuration has fields that this version does not know, as a later one
        writes: it can show the run, and would go on with it as something else."""
        self._look_at_config()
        if self._unknown:
            raise RunFolderError(
                f"{self.path / 'config.json'}: {'; '.join(self._unknown[:8])}. This version of SpeedLab can show the "
                "run; the one that wrote the file can go on with it"
            )

    def _stamp_of_config(self) -> tuple[int, int] | None:
        """Changes whenever the file is replaced; None when it is gone, and what was read holds."""
        try:
            found = os.stat(self.path / "config.json")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Make the folder of a new run, 0700, with its configuration and a first status.

        A configuration without a name gets the first free of 'run-1', 'run-2', … Raises ConfigError when the name is
        taken (suggesting the next free one) or when the place cannot be written.
        """
        parent = config.folder.resolve()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _claim_name(parent, config.name)
        except OSError as error:
            raise ConfigError(f"folder: {parent} cannot hold a run: {error.strerror}; give another folder") from error
        config = config.replace(name=path.name)
        try:
            for sub in ("records", "control", "checkpoints", "stream"):
                (path / sub).mkdir(mode=0o700)
            write_atomically(path / "status.json", _status_json(Status(steps=config.steps, updated=time.time())))
            # The configuration comes last: a folder that has one is complete.
            write_atomically(path / "config.json", config.to_json())
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)  # Only what was made here a moment ago: the name is free again.
            raise ConfigError(f"folder: {path} cannot be written: {error.strerror}; give another folder") from error
        return cls(path)

    # Status

    def read_status(self) -> Status:
        """The status as last written. Raises RunFolderError when it is missing or damaged."""
        path = self.path / "status.json"
        data = read_object(path, _STATUS_LIMIT_BYTES)
        try:
            return Status(
                state=RunState(data.get("state", "")),
                step=_whole(data, "step"),
                steps=_whole(data, "steps"),
                cluster=str(data.get("cluster", "")),
                token=str(data.get("token", "")),
                rank_pids=tuple(_process_id(pid) for pid in data.get("rank_pids", ())),
                command=_whole(data, "command"),
                text=str(data.get("text", "")),
                updated=float(data.get("updated", 0.0)),
            )
        except (TypeError, ValueError) as error:
            raise RunFolderError(f"{path}: is not the status of a run: {error}") from error

    def write_status(self, status: Status) -> None:
        """Replace the status in one move; readers see the old one or the new one, never a part."""
        write_atomically(self.path / "status.json", _status_json(replace(status, updated=time.time())))

    # Control words

    def read_events(self) -> list[Event]:
        """Every event that was written, oldest first. Lines that are no event are passed over."""
        try:
            with open_plain(self.path / "events.jsonl") as file:
                lines = file.read().splitlines()
        except FileNotFoundError:
            return []
        events = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                events.append(Event.from_json(line))
        return events

    def write_placement(self, rank: int, rows: list[dict[str, Any]]) -> None:
        """What `rank` holds now: the rows of its placement table."""
        folder = self.path / "placement"
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder / f"rank-{rank}.json", json.dumps({"rows": rows}))

    def read_placement(self, rank: int) -> list[dict[str, Any]]:
        """What was last written of `rank`. Raises RunFolderError when nothing was."""
        path = self.path / "placement" / f"rank-{rank}.json"
        found = read_object(path, _PLACEMENT_BYTES, missing={}).get("rows")
        if not isinstance(found, list):
            ranks = sorted(int(file.stem.removeprefix("rank-")) for file in path.parent.glob("rank-*.json"))
            told = f"ranks {ranks[0]} to {ranks[-1]} have" if ranks else "no rank has yet, as the run has not started"
            raise RunFolderError(f"{self.name}: rank {rank} has told of no placement; {told}")
        return found

    def post(self, word: str, *, key: str = "", **arguments: Any) -> int:
        """Ask something of the run; returns the word's number. Safe when several clients post at once.

        `key`: what `number_of` finds it by. Raises ValueError for a word outside CONTROL_WORDS and TypeError for
        arguments that are not JSON.
        """
        if word not in CONTROL_WORDS:
            raise ValueError(f"unknown control word {word!r}; known: {', '.join(CONTROL_WORDS)}")
        entry = {"word": word, "arguments": arguments, "time": time.time(), "pid": os.getpid(), "key": key}
        text = json.dumps(entry)
        if len(text) > _WORD_LIMIT_BYTES:
            raise ValueError(
                f"{word}: arguments of {len(text)} bytes; at most {_WORD_LIMIT_BYTES} bytes fit a control word"
            )
        control = self.path / "control"
        draft = control / f".draft-{os.getpid()}-{next(_DRAFTS)}"
        draft.write_text(text, encoding="utf-8")
        try:
            # Numbers never fall back behind the last one carried out, even if somebody has cleared the mailbox.
            for number in itertools.count(max(self.read_status().command, self._last_number()) + 1):
                try:
                    place(draft, _word_path(control, number))
                except FileExistsError:
                    continue  # Another client took the number.
                return number
        finally:
            draft.unlink(missing_ok=True)
        raise AssertionError("unreachable: the numbers do not end")

    def number_of(self, key: str) -> int | None:
        """The number of the word that was posted under `key`, among the newest; None when none was."""
        last = self._last_number()
        for number in range(last, max(0, last - _KEYS_LOOKED_AT), -1):
            with contextlib.suppress(RunFolderError):
                if read_object(_word_path(self.path / "control", number), _WORD_LIMIT_BYTES).get("key") == key:
                    return number
        return None

    def pending(self, after: int) -> list[RunCommand]:
        """Control words with a number above `after`, in order. Costs one failed open when there is none.

        Raises RunFolderError where the mailbox itself cannot be read."""
        return list(self._words_from(after + 1))

    def _words_from(self, first: int) -> Iterator[RunCommand]:
        last: int | None = None
        for number in itertools.count(first):
            path = _word_path(self.path / "control", number)
            try:
                data = read_object(path, _WORD_LIMIT_BYTES, missing=_NO_WORD)
            except RunFolderError:
                # A damaged word is no word; the ones behind it still count. Where no word can be read, none is there.
                last = self._last_number() if last is None else last
                if number > last:
                    return
                continue
            if data is _NO_WORD:
                return
            word, arguments, posted = data.get("word"), data.get("arguments"), data.get("time")
            if word in CONTROL_WORDS and isinstance(arguments, dict):
                when = posted if isinstance(posted, float) else 0.0
                yield RunCommand(number=number, word=word, arguments=arguments, time=when)

    def _last_number(self) -> int:
        control = self.path / "control"
        try:
            names = [re.fullmatch(r"(\d{6,12})\.json", name) for name in os.listdir(control)]
        except OSError as error:
            raise RunFolderError(
                f"{control}: cannot be read, so that nobody can tell the run anything: {error.strerror}"
            ) from error
        return max((int(match[1]) for match in names if match), default=0)

    def _read_config(self) -> RunConfig:
        path = self.path / "config.json"
        if not path.is_file():
            raise RunFolderError(
                f"{self.path} is no run folder: it has no config.json; runs are in {find_runs_text(self.path.parent)}"
            )
        data = read_object(path, _CONFIG_LIMIT_BYTES)
        try:
            known, self._unknown = RunConfig.known_in(data)
            return RunConfig(**known)
        except ConfigError as error:
            raise RunFolderError(f"{path}: {error}") from error

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"


_DRAFTS = itertools.count()


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Also through a link; False for one that goes in a circle, or into what may not be looked at."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def find_runs(parent: str | os.PathLike[str]) -> list[Path]:
    """The run folders in `parent`, the one whose status is newest first; [] when there is no such folder."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(parent) if is_folder(entry)]
    except OSError:
        return []
    aged = []
    for path in entries:
        try:
            aged.append((max(os.stat(path / name).st_mtime_ns for name in ("config.json", "status.json")), path))
        except OSError:
            continue  # No run, or one that another process is just creating.
    return [path for _, path in sorted(aged, reverse=True)]


def find_runs_text(parent: Path) -> str:
    """For errors: 'PARENT: a, b, c', or that there are none."""
    names = [path.name for path in find_runs(parent)]
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"{parent}: {shown or 'none yet'}"


def require_space(path: str | os.PathLike[str], needed_bytes: int) -> None:
    """Refuse, before anything is written, what does not fit on the disk that holds `path`. Raises RunFolderError."""
    place = Path(path).resolve()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        raise RunFolderError(
            f"no disk space: {needed_bytes / 2**30:.2f} GiB needed at {path}, {free_bytes / 2**30:.2f} GiB are free; "
            f"free {(needed_bytes - free_bytes) / 2**30:.2f} GiB there or give another folder"
        )


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a small file under another name, then move it into place; the directory never shows a part of it."""
    draft = path.with_name(f".{path.name}-{os.getpid()}-{next(_DRAFTS)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_object(path: Path, limit_bytes: int, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """A small JSON file that holds one object. Raises RunFolderError when it is missing (unless `missing` is given),
    larger than `limit_bytes`, or anything else than an object."""
    try:
        with open_plain(path) as file:
            data = file.read(limit_bytes + 1)
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise RunFolderError(f"{path}: is missing; the run folder is incomplete") from None
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > limit_bytes:
        raise RunFolderError(f"{path}: is larger than {limit_bytes} bytes, which no such file of a run is")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path}: holds a {type(value).__name__}; expected an object")
    return value


def _claim_name(parent: Path, name: str | None) -> Path:
    """Create the folder `name`, or the first free 'run-N'. mkdir is the claim, so two clients never share a folder."""
    if name is not None:
        try:
            (parent / name).mkdir(mode=0o700)
        except FileExistsError:
            raise ConfigError(
                f"name: the run {name!r} exists in {parent}; speedlab.attach({name!r}).resume() goes on with it; the "
                f"next free name is {_next_name(parent, name)!r}"
            ) from None
        return parent / name
    for number in itertools.count(1):
        try:
            (parent / f"run-{number}").mkdir(mode=0o700)
        except FileExistsError:
            continue
        return parent / f"run-{number}"
    raise AssertionError("unreachable: the numbers do not end")


def _next_name(parent: Path, name: str) -> str:
    """'quickstart' -> 'quickstart-2', 'run-3' -> 'run-4', and on while those exist too."""
    match = re.fullmatch(r"(.*)-(\d{1,9})", name)
    stem, number = (match[1], int(match[2])) if match else (name[:80], 1)
    return next(f"{stem}-{n}" for n in itertools.count(number + 1) if not (parent / f"{stem}-{n}").exists())


def _status_json(status: Status) -> str:
    written = {name: value for name, value in asdict(status).items() if name != "unread"}
    return json.dumps(written, separators=(",", ":"))


def _word_path(control: Path, number: int) -> Path:
    return control / f"{number:06d}.json"


def _whole(data: dict[str, Any], key: str) -> int:
    value = data.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{key} is {value!r}, not a whole number of at least 0")
    return value


def _process_id(value: Any) -> int:
    if not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"{value!r} in rank_pids is no process id")
    return value
