"""Which files a data source means, and what text is in them. No tokens here."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from speedlab.config import ConfigError, DataConfig
from speedlab.data.token_file import SUFFIXES

STDLIB = "stdlib"
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "lib2to3", "idlelib"}
"""Packages that are not the library's, test data that is broken on purpose, and tables of numbers."""
_SAMPLE_BYTES = 8192
_WHOLE_FILE_BYTES = 64 * 1024


class NotTextError(ConfigError):
    """A file that is binary, or not UTF-8."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file that belongs to the source. `name` is what its order is drawn from: the same on every machine."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    named: bool
    """The user gave this very file, so that it must be text; a file found in a folder may be left out."""


def describe(config: DataConfig) -> str:
    """The source in a few words, for messages."""
    given = sources(config)
    return given[0] if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"


def is_token_file(path: Path) -> bool:
    return path.suffix in SUFFIXES


def sources(config: DataConfig) -> list[str]:
    """The source as a list."""
    return [config.source] if isinstance(config.source, str) else list(config.source)


def expand(source: str) -> list[Path]:
    """Paths that one entry of the source names: itself, or a pattern's matches, sorted. Raises ConfigError if none."""
    path = Path(source).expanduser()
    if path.exists() or path.is_symlink():
        return [path]
    if any(c in source for c in "*?["):
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise ConfigError(
                f"data.source {source!r}: the pattern matches no file in {_here(path)}; check the pattern"
            )
        return [Path(match) for match in matches]
    raise ConfigError(
        f"data.source {source!r}: there is no such file or folder, looked for {_here(path)}; "
        f"give an existing path, or 'stdlib' for this Python's own sources"
    )


def find(config: DataConfig) -> list[TextFile]:
    """The text files of a source, sorted by name, each once; those of folders are the ones that are not hidden.

    Raises ConfigError: missing, unreadable, or nothing but empty files.
    """
    found: dict[Path, TextFile] = {}
    for source in sources(config):
        paths = [Path(sysconfig.get_path(STDLIB))] if source == STDLIB else expand(source)
        for path in paths:
            for file in (
                _walk(path, python_only=source == STDLIB) if path.is_dir() else [_text_file(path, path.name, True)]
            ):
                found.setdefault(file.path, file)
    files = sorted(found.values(), key=lambda file: (file.name, str(file.path)))
    for file in files:
        if file.named and file.size == 0:
            raise ConfigError(f"{file.path}: is empty; data.source needs text, remove the file or fill it")
    files = [file for file in files if file.size]
    if not files:
        raise ConfigError(
            f"data.source {config.source!r}: holds no text: {len(found)} files were found there, all empty; "
            f"give a folder with text files"
        )
    return files


def order_key(name: str) -> bytes:
    """Files in the order of this hash are in no order at all, and in the same one everywhere."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def choose(files: list[TextFile], max_bytes: int) -> list[tuple[TextFile, int]]:
    """Files and how many of each one's first bytes to read, at most `max_bytes` in all, sorted by hash.

    While there are few files every one gives an equal share, large ones only their beginning; once that share falls
    below 64 KiB, whole files are left out instead.
    """
    limit, budget, sizes = max_bytes, max_bytes, sorted(file.size for file in files)
    for i, size in enumerate(sizes):
        limit = budget // (len(sizes) - i)  # what each of the remaining, larger files may give
        if size > limit:
            break
        budget -= size
    else:
        limit = sizes[-1]
    limit = max(limit, _WHOLE_FILE_BYTES)
    chosen, left = [], max_bytes
    for file in sorted(files, key=lambda file: order_key(file.name)):
        take = min(file.size, limit, left)
        if take:
            chosen.append((file, take))
            left -= take
    return chosen


def read_text(file: TextFile, count: int) -> str:
    """Text in the first `count` bytes, to a whole character. Raises ConfigError: unreadable; NotTextError: binary."""
    try:
        with file.path.open("rb") as handle:
            data = handle.read(count)
    except OSError as error:
        raise ConfigError(_unreadable(file.path, error)) from None
    # Only a file that is cut short on purpose may end within a character.
    return _decode(file.path, data, final=count >= file.size)


def probe(file: TextFile) -> None:
    """Look at the first bytes. Raises ConfigError: unreadable; NotTextError: binary."""
    read_text(file, min(file.size, _SAMPLE_BYTES))


def _decode(path: Path, data: bytes, *, final: bool) -> str:
    zero = data.find(b"\0")
    if zero >= 0:
        raise NotTextError(
            f"{path}: is binary: byte {zero:,} is zero, text has none; leave the file out, "
            f"or give token ids in a .tokens or .bin file"
        )
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=final)
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"{path}: is not UTF-8 text: byte {error.start:,} is 0x{error.object[error.start]:02x}; "
            f"convert it to UTF-8, or leave it out"
        ) from None


def _text_file(path: Path, name: str, named: bool) -> TextFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(_unreadable(path, error)) from None
    if not path.is_file():
        raise ConfigError(f"{path}: is neither a file nor a folder; data.source takes files or folders of text")
    return TextFile(path=path, name=name, size=stat.st_size, mtime_ns=stat.st_mtime_ns, named=named)


def _walk(root: Path, *, python_only: bool) -> Iterator[TextFile]:
    def refuse(error: OSError) -> None:
        raise ConfigError(_unreadable(Path(error.filename or root), error)) from None

    for folder, inner, names in os.walk(root, onerror=refuse):
        skipped = _STDLIB_SKIPPED if python_only else {"__pycache__"}
        inner[:] = sorted(name for name in inner if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            wanted = name.endswith(".py") if python_only else not name.startswith(".") and not is_token_file(path)
            if wanted and path.is_file():
                yield _text_file(path, path.relative_to(root).as_posix(), False)


def _here(path: Path) -> str:
    return str(path if path.is_absolute() else Path.cwd() / path)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read: {error.strerror}; make it readable for this user, or leave it out of data.source"
