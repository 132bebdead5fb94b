"""The files of a data source, and their text. No tokens here."""

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
"""Folders outside the standard library, test data that are broken on purpose, and tables of numbers."""
_SAMPLE_BYTES = 8192
_WHOLE_FILE_BYTES = 64 * 1024


class NotTextError(ConfigError):
    """A file is binary, or not UTF-8."""


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file of the source. Its order depends only on `name`, which is the same on every machine."""

    path: Path
    name: str
    size: int
    mtime_ns: int
    named: bool
    """Whether the user gave this file and not its folder. Such a file must be text; other files may be skipped."""


def describe(config: DataConfig) -> str:
    """Return a short description of the source for messages.

    Args:
        config: Source.
    """
    given = sources(config)
    return given[0] if len(given) == 1 else f"{given[0]} and {len(given) - 1} more"


def is_token_file(path: Path) -> bool:
    """Return whether the suffix is that of a token file.

    Args:
        path: Path of a file.
    """
    return path.suffix in SUFFIXES


def sources(config: DataConfig) -> list[str]:
    """Return the source as a list.

    Args:
        config: Source.
    """
    return [config.source] if isinstance(config.source, str) else list(config.source)


def expand(source: str) -> list[Path]:
    """Return the paths of one entry of the source: the path itself, or a pattern's sorted matches.

    Args:
        source: A path or a glob pattern.

    Raises:
        ConfigError: If there is no such path.
    """
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
    """Return the text files of a source, sorted by name, each once. Hidden files of folders are skipped.

    Args:
        config: Source.

    Raises:
        ConfigError: If files are missing or unreadable, or all are empty.
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
    """Return a hash of a file name, which gives a random order of files that is the same on every machine.

    Args:
        name: Name of a file.
    """
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def choose(files: list[TextFile], max_bytes: int) -> list[tuple[TextFile, int]]:
    """Choose how many bytes to read from the start of each file, sorted by hash.

    While there are few files, each contributes at most an equal share. If that share would be below 64 KiB, whole files
    are skipped instead.

    Args:
        files: Files of the source, not empty.
        max_bytes: Limit for the sum of bytes.

    Returns:
        Chosen files with their numbers of bytes.
    """
    limit, budget, sizes = max_bytes, max_bytes, sorted(file.size for file in files)
    for i, size in enumerate(sizes):
        limit = budget // (len(sizes) - i)  # equal share of the remaining, larger files
        if size > limit:
            break
        budget -= size
    else:
        limit = sizes[-1]
    # Prefer fewer whole files to many short fragments.
    limit = max(limit, _WHOLE_FILE_BYTES)
    chosen, left = [], max_bytes
    for file in sorted(files, key=lambda file: order_key(file.name)):
        take = min(file.size, limit, left)
        if take:
            chosen.append((file, take))
            left -= take
    return chosen


def read_text(file: TextFile, count: int) -> str:
    """Return the text of the first bytes of a file, cut to a whole character.

    Args:
        file: File to read.
        count: Number of bytes.

    Raises:
        ConfigError: If the file cannot be read.
        NotTextError: If the file is binary or not UTF-8.
    """
    try:
        with file.path.open("rb") as handle:
            data = handle.read(count)
    except OSError as error:
        raise ConfigError(_unreadable(file.path, error)) from None
    # Only a partial read may end inside a character.
    return _decode(file.path, data, final=count >= file.size)


def probe(file: TextFile) -> None:
    """Check the first bytes of a file.

    Args:
        file: File to read.

    Raises:
        ConfigError: If the file cannot be read.
        NotTextError: If the file is binary or not UTF-8.
    """
    read_text(file, min(file.size, _SAMPLE_BYTES))


def _decode(path: Path, data: bytes, *, final: bool) -> str:
    zero = data.find(b"\0")
    if zero >= 0:
        raise NotTextError(
            f"{path}: is binary: byte {zero:,} is zero, text has none; leave the file out, "
            f"or give token ids in a .tokens or .bin file"
        )
    try:
        # utf-8-sig drops a byte order mark.
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
