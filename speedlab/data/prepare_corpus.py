"""From a DataConfig to memory-mapped tokens.

1. Find the files (`sources.find`) and choose at most `max_bytes` of them, spread by a hash of their names.
2. Split by file: held-out files are the first in that order that fit into `heldout_share` of the bytes.
3. Train the tokenizer on a part of the training text.
4. Encode both parts into two `.tokens` files. The end-of-text token follows each file and separates documents
   (`packing`).
5. Cache the result in one folder, named by a hash of everything that determines it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

import speedlab.data.sources as found
from speedlab.config import ConfigError, DataConfig
from speedlab.data.cache import (
    SlowProgress,
    default_cache,
    explain_disk_errors,
    fingerprint,
    largest_token,
    locked,
    new_folder,
)
from speedlab.data.encoding import build, refuse_all_binary
from speedlab.data.packing import check_ends, end_token, refuse_task
from speedlab.data.sources import describe, is_token_file
from speedlab.data.synthetic_tasks import Task, parts_of, task_of
from speedlab.data.token_file import SUFFIXES, map_tokens, read_header
from speedlab.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    NumberTokenizer,
    Tokenizer,
    parallel_tokenizing,
)

_FORMAT = 1  # increase this number if a code change would encode the same files differently


@dataclass(frozen=True, kw_only=True, repr=False)
class Corpus:
    """Tokens of a data source.

    Attributes:
        source: Description of the source, for messages.
        train: (N,) uint16 or uint32, read-only; memory-mapped except for a synthetic task.
        heldout: Same as `train`.
        tokenizer: Encodes prompts and decodes tokens.
    """

    source: str
    train: np.ndarray
    heldout: np.ndarray
    tokenizer: Tokenizer
    max_token: int
    """Largest id in both parts."""
    end: int | None = None
    """Token that ends each document, if documents are kept separate."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all ids of the corpus and of its tokenizer are inside a model's vocabulary.

        Args:
            vocab_size: The model's vocabulary size.

        Raises:
            ConfigError: If an id is outside.
        """
        if self.max_token >= vocab_size:
            raise ConfigError(
                f"{self.source}: token {self.max_token:,} is outside the model's vocabulary: model.vocab_size is "
                f"{vocab_size:,}; set it to at least {max(self.max_token + 1, self.tokenizer.vocab_size):,}"
            )
        if self.tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"{self.source}: the tokenizer has {self.tokenizer.vocab_size:,} tokens, model.vocab_size is "
                f"{vocab_size:,}, so a prompt could hold a token outside it; "
                f"set model.vocab_size to {self.tokenizer.vocab_size:,}"
            )

    def __repr__(self) -> str:
        return (
            f"Corpus({self.source}: {len(self.train):,} tokens to train, {len(self.heldout):,} held out, "
            f"vocabulary {self.tokenizer.vocab_size:,})"
        )


def check(config: DataConfig) -> None:
    """Refuse unsuitable data without tokenizing.

    Args:
        config: Source and how it is split.

    Raises:
        ConfigError: If data are missing, unreadable, empty, binary or far too short.
    """
    if task := task_of(config):
        refuse_task(config)
        task.samples(1, config.sequence_length, config.vocab_size, seed=0)
        return
    if config.tokenizer not in ("bpe", "bytes"):
        end_token(config, FileTokenizer(config.tokenizer))
    token_files = _token_files(config)
    if token_files:
        headers = [read_header(path) for path in token_files]
        if config.documents == "separate":
            end_token(config, _tokenizer_of(config, token_files[0], headers[0].vocabulary or 1))
        _long_enough(config, headers[0].count, f"{headers[0].path}")
        return
    files = found.find(config)
    for file in files:
        if file.named:
            found.probe(file)
    if not any(file.named for file in files):
        refuse_all_binary(config, files)
    chosen = found.choose(files, config.max_bytes)
    # Upper bound: one token per byte, and one for the end of each file.
    _long_enough(config, sum(take + 1 for _, take in chosen), describe(config), "raise data.max_bytes")


def prepare(
    config: DataConfig, *, cache: Path | None = None, progress: Callable[[str], object] | None = print
) -> Corpus:
    """Return the tokens of a source, encoded now or read from the cache. All ranks may call this concurrently.

    Sets TOKENIZERS_PARALLELISM if it is not set and text is encoded.

    Args:
        config: Source and how it is split.
        cache: Folder of the cache; by default `speedlab` in XDG_CACHE_HOME or ~/.cache.
        progress: Gets a line of text about once a second if this takes longer; None for silence.

    Raises:
        ConfigError: If data are unreadable, empty or binary, a token file is damaged, a sequence is longer than the
            training or the held-out part, or the cache cannot be written.
    """
    if task := task_of(config):
        return _of_task(config, task)
    report = SlowProgress(progress)
    cache = default_cache() if cache is None else Path(cache)
    token_files = _token_files(config)
    corpus = _from_token_files(config, token_files, cache) if token_files else _from_text(config, cache, report)
    _long_enough(config, len(corpus.train), f"the training part of {corpus.source}")
    _long_enough(config, len(corpus.heldout), f"the held-out part of {corpus.source}", "raise data.heldout_share")
    report.done(f"{corpus.source}: {len(corpus.train):,} tokens to train on, {len(corpus.heldout):,} held out")
    return corpus


def _of_task(config: DataConfig, task: Task) -> Corpus:
    """Generate the corpus of a task. Each rank generates it again, which is faster than reading it."""
    refuse_task(config)
    train, heldout = parts_of(config, task)
    tokenizer = NumberTokenizer(config.vocab_size)
    return Corpus(
        source=describe(config), train=train, heldout=heldout, tokenizer=tokenizer, max_token=config.vocab_size - 1
    )


def _token_files(config: DataConfig) -> list[Path]:
    """Return [] for text; [train] or [train, held-out] for token files, given directly or as nanoGPT's folder."""
    given = found.sources(config)
    paths = [path for source in given if source != found.STDLIB for path in found.expand(source)]
    if len(paths) == 1 and paths[0].is_dir():
        return _train_and_val(paths[0])
    token_files = [path for path in paths if is_token_file(path)]
    if token_files and (len(given) > 1 or len(paths) > 1):
        raise ConfigError(
            f"{token_files[0]}: a token file is a source of its own, data.source names {max(len(given), len(paths))}; "
            f"give one token file, or a folder that holds train.bin and val.bin"
        )
    return token_files


def _train_and_val(folder: Path) -> list[Path]:
    for suffix in SUFFIXES:
        pair = [folder / f"train{suffix}", folder / f"val{suffix}"]
        if pair[0].is_file():
            return [path for path in pair if path.is_file()]
    return []


def _from_token_files(config: DataConfig, paths: list[Path], cache: Path) -> Corpus:
    headers = [read_header(path) for path in paths]
    largest = max(largest_token(header, cache) for header in headers)
    stated = max((header.vocabulary or 0 for header in headers), default=0)
    tokenizer = _tokenizer_of(config, paths[0], max(stated, largest + 1))
    if largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"{paths[0]}: token {largest:,} is outside the vocabulary of its tokenizer, which has "
            f"{tokenizer.vocab_size:,} tokens; set data.tokenizer to the tokenizer.json the file was made with"
        )
    end = end_token(config, tokenizer)
    parts = [map_tokens(header) for header in headers]
    if len(parts) == 1:
        # A single token file has no documents to split by, so its end is held out.
        cut = int(len(parts[0]) * (1 - config.heldout_share))
        parts = [parts[0][:cut], parts[0][cut:]]
    if end is not None:
        check_ends(parts[0], end, str(paths[0]))
    return Corpus(
        source=describe(config), train=parts[0], heldout=parts[1], tokenizer=tokenizer, max_token=largest, end=end
    )


def _tokenizer_of(config: DataConfig, path: Path, vocabulary: int) -> Tokenizer:
    """Return the configured tokenizer. For 'bpe', which cannot be trained on ids, use the tokenizer.json next to
    the file.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer != "bpe":
        return FileTokenizer(config.tokenizer)
    alongside = path.parent / "tokenizer.json"
    return FileTokenizer(alongside) if alongside.is_file() else NumberTokenizer(vocabulary)


def _from_text(config: DataConfig, cache: Path, report: SlowProgress) -> Corpus:
    files = found.find(config)
    own = Path(config.tokenizer).expanduser() if config.tokenizer not in ("bpe", "bytes") else None
    # The cache key contains the content of tokenizer.json, so the file must be valid first.
    tokenizer = FileTokenizer(own) if own else ByteTokenizer() if config.tokenizer == "bytes" else None
    if tokenizer is not None:
        end_token(config, tokenizer)  # Fail before encoding if an end token is missing.
    key = fingerprint(
        _FORMAT,
        version("tokenizers"),
        own.read_text(encoding="utf-8") if own else [config.tokenizer, config.vocab_size],
        [config.heldout_share, config.max_bytes],
        [[str(file.path), file.name, file.size, file.mtime_ns, file.named] for file in files],
    )
    folder = cache / "corpora" / key
    corpus = _load(config, folder, tokenizer, cache, report)
    if corpus is None:
        with explain_disk_errors(cache):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f"{key}.lock"), report):
                corpus = _load(config, folder, tokenizer, cache, report)  # another rank may have built it first
                if corpus is None:
                    with parallel_tokenizing(), new_folder(folder) as part:
                        build(config, files, tokenizer, part, report)
                    corpus = _load(config, folder, tokenizer, cache, report)
    if corpus is None:
        raise ConfigError(f"{folder}: what was just written there cannot be read back; check the disk")
    return corpus


def _load(
    config: DataConfig, folder: Path, tokenizer: Tokenizer | None, cache: Path, report: SlowProgress
) -> Corpus | None:
    """Return the corpus in a folder of the cache; None if there is none, or if it is damaged and must be rebuilt."""
    if not folder.exists():
        return None
    try:
        headers = [read_header(folder / f"{part}.tokens") for part in ("train", "heldout")]
        largest = max(largest_token(header, cache) for header in headers)
        tokenizer = tokenizer or FileTokenizer(folder / "tokenizer.json")
    except ConfigError as error:
        report.say(f"the cache is damaged and will be made again: {error}")
        return None
    train, heldout = (map_tokens(header) for header in headers)
    end = end_token(config, tokenizer)
    return Corpus(
        source=describe(config), train=train, heldout=heldout, tokenizer=tokenizer, max_token=largest, end=end
    )


def _long_enough(config: DataConfig, count: int, what: str, more: str = "give more text") -> None:
    length = config.sequence_length
    if count < length + 1:
        shorter = f"lower it to at most {count - 1:,}, or {more}" if count > 1 else more
        raise ConfigError(
            f"data.sequence_length {length:,} is longer than {what}: a sequence and its target need "
            f"{length + 1:,} tokens, there are {count:,}; {shorter}"
        )
