"""Encode text into token files: the held-out split, tokenizer training, and encoding in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import speedlab.data.sources as found
from speedlab.config import ConfigError, DataConfig
from speedlab.data.cache import SlowProgress
from speedlab.data.sources import NotTextError, TextFile, describe
from speedlab.data.token_file import write_tokens
from speedlab.data.tokenizer import Tokenizer, train_bpe

_BPE_TRAINING_CHARACTERS = 2 * 2**20
_PIECE_CHARACTERS = 64 * 1024
_BATCH_CHARACTERS = 1 << 20
_LONG_LINE = 4096


def build(
    config: DataConfig, files: list[TextFile], tokenizer: Tokenizer | None, folder: Path, report: SlowProgress
) -> None:
    """Write train.tokens, heldout.tokens and, if no tokenizer is given, tokenizer.json into `folder`.

    Args:
        config: Source and how it is split.
        files: Files of the source.
        tokenizer: Given tokenizer; None to train BPE.
        folder: Output folder.
        report: Prints progress.

    Raises:
        ConfigError: If a file that the user named is not text, or no file is text.
    """
    source, count = describe(config), len(files)
    files, left_out = _only_text(files)
    if not files:
        raise ConfigError(_no_text(config, left_out))
    chosen = found.choose(files, config.max_bytes)
    train, heldout = split(chosen, config.heldout_share)
    if tokenizer is None:
        report(f"{source}: training the tokenizer")
        sample = list(_first(_texts(train, left_out), _BPE_TRAINING_CHARACTERS))
        tokenizer = train_bpe(sample, config.vocab_size, folder / "tokenizer.json")
    total, done = sum(take for _, take in chosen), 0
    for name, parts in (("train", train), ("heldout", heldout)):

        def encoded(parts: list[TextShare] = parts) -> Iterator[np.ndarray]:
            nonlocal done
            for ids, characters in _encode(_texts(parts, left_out), tokenizer):
                yield ids
                done += characters
                report(f"{source}: encoded {min(done, total) / 2**20:.1f} of {total / 2**20:.1f} MiB")

        write_tokens(folder / f"{name}.tokens", encoded(), tokenizer.vocab_size)
    if left_out:
        first = next(iter(left_out.values()))
        report.say(f"{source}: left out {len(left_out)} of {count} files that are not text; the first: {first}")


@dataclass(frozen=True)
class TextShare:
    """A share of a file's text: [0, 1) is all of its first `take` bytes."""

    file: TextFile
    take: int
    start: float = 0.0
    stop: float = 1.0


def split(chosen: list[tuple[TextFile, int]], share: float) -> tuple[list[TextShare], list[TextShare]]:
    """Split into (train, held-out): whole files are held out, in the given order, up to `share` of the bytes.

    If the files are too few or too large for that, the end of every file is held out.

    Args:
        chosen: Files and the number of bytes to read from each.
        share: Share of the bytes to hold out.
    """
    budget = share * sum(take for _, take in chosen)
    heldout: set[Path] = set()
    held_bytes = 0
    for file, take in chosen:
        # A file that would exceed the budget stays in the training part.
        if held_bytes < 0.9 * budget and held_bytes + take <= budget:
            heldout.add(file.path)
            held_bytes += take
    # Whole files miss the share by far, so hold out the end of every file.
    if held_bytes < 0.5 * budget:
        cut = 1 - share
        return [TextShare(file, take, 0, cut) for file, take in chosen], [
            TextShare(file, take, cut, 1) for file, take in chosen
        ]
    parts = [TextShare(file, take) for file, take in chosen]
    return [p for p in parts if p.file.path not in heldout], [p for p in parts if p.file.path in heldout]


def _texts(parts: list[TextShare], left_out: dict[Path, NotTextError]) -> Iterator[str]:
    """Yield the text of each part, cut at a line end. Files of a folder that are not text are added to `left_out`."""
    for part in parts:
        try:
            text = found.read_text(part.file, part.take)
        except NotTextError as error:
            if part.file.named:
                raise
            left_out[part.file.path] = error
            continue
        start, stop = _line_end(text, part.start), _line_end(text, part.stop)
        if start < stop:
            yield text[start:stop]


def _line_end(text: str, share: float) -> int:
    """Return the index of `share` of the text, moved back to a line end unless that is far."""
    cut = int(len(text) * share)
    if cut in (0, len(text)):
        return cut
    line = text.rfind("\n", 0, cut) + 1
    return line if line and cut - line <= min(_LONG_LINE, cut // 20) else cut


def _encode(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (ids, number of characters) of batches of pieces: large enough for threads, small enough for memory."""
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=np.int64)
    for batch in _batches(_pieces(texts)):
        ids = []
        for piece, (_, last) in zip(tokenizer.encode_batch([text for text, _ in batch]), batch, strict=True):
            ids.append(piece)
            if last:
                ids.append(end)
        yield np.concatenate(ids), sum(len(text) for text, _ in batch)


def _pieces(texts: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """Yield (piece, whether it is the last of its text). Long texts are cut, at a line end if there is one."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = min(start + _PIECE_CHARACTERS, len(text))
            if stop < len(text):
                stop = text.rfind("\n", start, stop) + 1 or stop
            yield text[start:stop], stop == len(text)
            start = stop


def _batches(pieces: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def refuse_all_binary(config: DataConfig, files: list[TextFile]) -> None:
    """Raise ConfigError if no file begins with text. This stops at the first text file.

    Args:
        config: Source, for the message.
        files: Files of the source.

    Raises:
        ConfigError: If no file begins with text.
    """
    left_out = {}
    for file in files:
        try:
            found.probe(file)
            return
        except NotTextError as error:
            left_out[file.path] = error
    raise ConfigError(_no_text(config, left_out))


def _only_text(files: list[TextFile]) -> tuple[list[TextFile], dict[Path, NotTextError]]:
    """Return the files that begin with text, and the errors of the others. Raises NotTextError for a file the user
    named.
    """
    text, left_out = [], {}
    for file in files:
        try:
            found.probe(file)
            text.append(file)
        except NotTextError as error:
            if file.named:
                raise
            left_out[file.path] = error
    return text, left_out


def _no_text(config: DataConfig, left_out: dict[Path, NotTextError]) -> str:
    first = next(iter(left_out.values()))
    return f"{describe(config)}: none of the {len(left_out)} files there is text; the first: {first}"
