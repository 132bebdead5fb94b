"""The run folder: read and write a run's configuration, status, control commands, events and placement tables.

All files except the records are small JSON files. Writers replace a file or append to it; they never change bytes in
place. Readers trust nothing, because a folder may come from another machine: they bound every size and check every
field.

Also in this file:

- `place` publishes a file exactly once, when several processes compete for one name.
- `open_plain` opens a file for reading and refuses pipes and devices, which could block the reader.
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
"""Errors of `link` on file systems without hard links: exFAT, FUSE and some shared folders of virtual machines."""


def place(draft: Path, path: Path) -> None:
    """Move `draft` to `path`, unless `path` already exists. Readers of `path` see nothing or the whole file.

    Args:
        draft: The complete file, in the folder of `path`. It stays in place if the move fails.
        path: The final name.

    Raises:
        FileExistsError: Another process has created `path` first.
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
    # The kernel releases an flock when its process ends, so a process that is killed here blocks no other process.
    lock = os.open(path.parent / ".place-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        draft.rename(path)
    finally:
        os.close(lock)


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open the regular file at `path` for reading in binary mode.

    Args:
        path: The file. A pipe would block its reader for ever, and some devices never end.

    Raises:
        OSError: `path` is missing, a directory, a pipe or a device.
    """
    return os.fdopen(plain_descriptor(path), "rb")


def plain_descriptor(path: str | os.PathLike[str]) -> int:
    """Return a file descriptor of the regular file at `path`, for readers that use `os.pread`.

    Args:
        path: The file.

    Raises:
        OSError: `path` is missing, a directory, a pipe or a device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: opening a pipe would block.
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))


CONTROL_WORDS = ("pause", "resume", "step", "stop", "save", "reshape", "prove", "live")
"""Commands that a client may send to a run. All ranks execute a command between the same two steps."""

TOKENIZER = "tokenizer"
"""Subfolder of the run folder with the tokenizer, in the format of transformers."""

UNSUPERVISED = "the cluster's supervisor has ended; the next client starts another one, and the run goes on"
"""Status text of a run that paused itself because its supervisor ended. The next supervisor resumes the run."""

_CONFIG_LIMIT_BYTES = 2**20
_STATUS_LIMIT_BYTES = 2**18
_WORD_LIMIT_BYTES = 2**14
_KEYS_LOOKED_AT = 32
_NO_WORD: dict[str, Any] = {}
"""Sentinel for a missing command file. Compared by identity: an empty object in a file is a damaged command."""
_PLACEMENT_BYTES = 2**28


class RunFolderError(RuntimeError):
    """A folder that holds no run or damaged files, or that cannot be written."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the message alone, because the stack frames would be internal ones."""
        return [f"{type(self).__name__}: {with_more(self)}"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run, as its engines last wrote it.

    Attributes:
        cluster: Name of the cluster whose engines hold the run.
        token: Tells clusters of the same name from each other.
        rank_pids: Process ids of the engines by rank, for display.
        command: Number of the last command that was executed.
        updated: Seconds since 1970; filled in when the status is written.
        unread: Why the newest status could not be read. Never written to the file.
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
    def reported(self) -> str:
        """Text of the run about its state, followed by the reason why the status could not be read, if any."""
        return " · ".join(filter(None, (self.text, self.unread)))


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """A command as a client posted it. Numbers count up from 1 within a run."""

    number: int
    word: str
    arguments: dict[str, Any] = field(default_factory=dict)
    time: float = field(default=0.0, compare=False)
    """Seconds since 1970."""


class RunFolder:
    """An existing run folder.

    Args:
        path: The folder.

    Raises:
        RunFolderError: `path` holds no run, or its configuration is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).resolve()
        self._config_stamp = self._stamp_of_config()
        self._unknown: list[str] = []
        """One sentence for each entry of the configuration that this version has no field for."""
        self._config = self._read_config()

    @property
    def name(self) -> str:
        """The name of the run, which is the name of its folder."""
        return self.path.name

    @property
    def config(self) -> RunConfig:
        """The current configuration; read again after the file was replaced, for example after a change of the world
        size.
        """
        self._look_at_config()
        return self._config

    def _look_at_config(self) -> None:
        stamp = self._stamp_of_config()
        if stamp not in (None, self._config_stamp):
            self._config, self._config_stamp = self._read_config(), stamp

    def update_config(self, config: RunConfig) -> None:
        """Replace the configuration atomically.

        Call this only while no rank advances the run, because engines read the file when they build the run.

        Args:
            config: The new configuration.

        Raises:
            RunFolderError: The present configuration has unknown fields (see `require_known`).
        """
        self.require_known()
        write_atomically(self.path / "config.json", config.to_json())

    def require_known(self) -> None:
        """Refuse a configuration with fields that this version does not know.

        A later version of SpeedLab may have written such fields. This version can show the run, but would continue it
        with a different meaning.

        Raises:
            RunFolderError: There are unknown fields.
        """
        self._look_at_config()
        if self._unknown:
            raise RunFolderError(
                f"{self.path / 'config.json'}: {'; '.join(self._unknown[:8])}. This version of SpeedLab can show the "
                "run; the one that wrote the file can go on with it"
            )

    def _stamp_of_config(self) -> tuple[int, int] | None:
        """Return a value that changes when the file is replaced; None if the file is gone, so that the last read stays
        valid.
        """
        try:
            found = os.stat(self.path / "config.json")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Create the folder of a new run (mode 0700) with its configuration and a first status.

        Args:
            config: The configuration. If it has no name, the run gets the first free of 'run-1', 'run-2', …

        Raises:
            ConfigError: The name is taken (the message suggests the next free name), or the folder cannot be written.
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
            # Write the configuration last: a folder with a configuration is complete.
            write_atomically(path / "config.json", config.to_json())
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)  # Removes only the folder created above, so the name is free again.
            raise ConfigError(f"folder: {path} cannot be written: {error.strerror}; give another folder") from error
        return cls(path)

    # Status

    def read_status(self) -> Status:
        """Return the status as last written.

        Raises:
            RunFolderError: The file is missing or damaged.
        """
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
        """Replace the status atomically: readers see the old or the new one, never a part.

        Args:
            status: The new status. Its `updated` is set to the current time.
        """
        write_atomically(self.path / "status.json", _status_json(replace(status, updated=time.time())))

    # Events, placement tables and commands

    def read_events(self) -> list[Event]:
        """Return all events, oldest first. Damaged lines are skipped."""
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
        """Write the placement table of a rank.

        Args:
            rank: The rank.
            rows: One row per parameter, as `speedlab.placement.ParamPlacement.described` returns it.
        """
        folder = self.path / "placement"
        folder.mkdir(mode=0o700, exist_ok=True)
        write_atomically(folder / f"rank-{rank}.json", json.dumps({"rows": rows}))

    def read_placement(self, rank: int) -> list[dict[str, Any]]:
        """Return the placement rows that `rank` wrote last.

        Args:
            rank: The rank.

        Raises:
            RunFolderError: This rank has written no table, or the file is damaged.
        """
        path = self.path / "placement" / f"rank-{rank}.json"
        found = read_object(path, _PLACEMENT_BYTES, missing={}).get("rows")
        if not isinstance(found, list):
            ranks = sorted(int(file.stem.removeprefix("rank-")) for file in path.parent.glob("rank-*.json"))
            reported = (
                f"ranks {ranks[0]} to {ranks[-1]} have" if ranks else "no rank has yet, as the run has not started"
            )
            raise RunFolderError(f"{self.name}: rank {rank} has reported no placement; {reported}")
        return found

    def post(self, word: str, *, key: str = "", **arguments: Any) -> int:
        """Send a command to the run and return the command's number. Safe when several clients post at once.

        Args:
            word: One of CONTROL_WORDS.
            key: A key with which `number_of` finds the command later.
            **arguments: Arguments of the command; must be JSON.

        Raises:
            ValueError: The command is unknown, or its arguments are too large.
            TypeError: The arguments are not JSON.
            RunFolderError: The mailbox or the status cannot be read.
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
        # Write a draft first, so that no rank reads a part of a command.
        draft = control / f".draft-{os.getpid()}-{next(_DRAFTS)}"
        draft.write_text(text, encoding="utf-8")
        try:
            # Start above the last executed number, even if the mailbox was cleared: ranks ignore lower numbers.
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
        """Return the number of the command that was posted under `key`; None if there is none among the newest.

        Args:
            key: The `key` given to `post`.
        """
        last = self._last_number()
        for number in range(last, max(0, last - _KEYS_LOOKED_AT), -1):
            with contextlib.suppress(RunFolderError):
                if read_object(_word_path(self.path / "control", number), _WORD_LIMIT_BYTES).get("key") == key:
                    return number
        return None

    def pending(self, after: int) -> list[RunCommand]:
        """Return the commands with a number above `after`, in order. Costs one failed open if there is none.

        Args:
            after: Number of the last command that was executed.

        Raises:
            RunFolderError: The mailbox cannot be read.
        """
        return list(self._words_from(after + 1))

    def _words_from(self, first: int) -> Iterator[RunCommand]:
        last: int | None = None
        for number in itertools.count(first):
            path = _word_path(self.path / "control", number)
            try:
                data = read_object(path, _WORD_LIMIT_BYTES, missing=_NO_WORD)
            except RunFolderError:
                # Skip a damaged command, but read the later ones, up to the last number in the directory.
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
                f"{control}: cannot be read, so that the run gets no commands: {error.strerror}"
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
    """Return whether `entry` is a directory or a link to one; False for circular links and unreadable targets.

    Args:
        entry: An entry of `os.scandir`.
    """
    try:
        return entry.is_dir()
    except OSError:
        return False


def find_runs(parent: str | os.PathLike[str]) -> list[Path]:
    """Return the run folders in `parent`, the most recently changed first; [] if `parent` does not exist.

    Args:
        parent: Folder that contains run folders.
    """
    try:
        entries = [Path(entry.path) for entry in os.scandir(parent) if is_folder(entry)]
    except OSError:
        return []
    aged = []
    for path in entries:
        try:
            aged.append((max(os.stat(path / name).st_mtime_ns for name in ("config.json", "status.json")), path))
        except OSError:
            continue  # Not a run, or another process is creating the run now.
    return [path for _, path in sorted(aged, reverse=True)]


def find_runs_text(parent: Path) -> str:
    """Return 'PARENT: a, b, c' or 'PARENT: none yet', for error messages.

    Args:
        parent: Folder that contains run folders.
    """
    names = [path.name for path in find_runs(parent)]
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"{parent}: {shown or 'none yet'}"


def require_space(path: str | os.PathLike[str], needed_bytes: int) -> None:
    """Refuse a write that does not fit on the disk, before anything is written.

    Args:
        path: Target; may not exist yet.
        needed_bytes: Bytes that will be written.

    Raises:
        RunFolderError: The disk that holds `path` has less free space.
    """
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
    """Write a small file under a temporary name, then rename it: readers never see a part of the file.

    Args:
        path: Final name. An existing file is replaced.
        text: Content, written as UTF-8.
        mode: Permissions of the file.
    """
    draft = path.with_name(f".{path.name}-{os.getpid()}-{next(_DRAFTS)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    # Also on Ctrl-C: leave no draft.
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_object(path: Path, limit_bytes: int, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a small JSON file that holds one object.

    Args:
        path: The file.
        limit_bytes: Refuse larger files.
        missing: Return this if the file does not exist.

    Raises:
        RunFolderError: The file is missing (and `missing` is None), too large, unreadable, or holds no JSON object.
    """
    try:
        with open_plain(path) as file:
            # One byte above the limit shows that the file is too large, without reading all of it.
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
    """Create the folder `name`, or the first free 'run-N'. Two clients never share a folder, because `mkdir`
    is atomic.
    """
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
    """Return the next free name: 'quickstart' -> 'quickstart-2', 'run-3' -> 'run-4'; skip names that exist."""
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
