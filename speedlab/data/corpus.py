"""From a DataConfig to memory-mapped tokens: find the text, split it, train the tokenizer, encode, remember.

1. Find the files (`files.find`) and choose at most `max_bytes` of them, spread by a hash of their names.
2. Split by file: held-out files are the first in that order that fit into `heldout_share` of the bytes.
3. Train the tokenizer on a part of the training text.
4. Encode both parts, each file followed by the end-of-text token, into two `.tokens` files. Where documents are to be
   separate, that token tells them apart (`documents`).
5. Keep all this in one folder of the user's cache, named by a hash of whatever it depends on.
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

_FORMAT = 1  # raise it when a change of code would encode the same files differently


@dataclass(frozen=True, kw_only=True, repr=False)
class Corpus:
    """Tokens of a data source. `train` and `heldout` are (N,) uint16 or uint32, read-only, and memory-mapped but of a
    synthetic task."""

    source: str
    train: np.ndarray
    heldout: np.ndarray
    tokenizer: Tokenizer
    max_token: int
    """The largest id in both parts."""
    end: int | None = None
    """The token that ends each document, where documents are to be kept apart."""

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError when a token, or one the tokenizer can give, is outside a model's vocabulary."""
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
    """Refuse unfit data without tokenizing: ConfigError if missing, unreadable, empty, binary or far too short."""
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
    # A byte makes at most one token, and a file one more for its end.
    _long_enough(config, sum(take + 1 for _, take in chosen), describe(config), "raise data.max_bytes")


def prepare(
    config: DataConfig, *, cache: Path | None = None, progress: Callable[[str], object] | None = print
) -> Corpus:
    """The tokens of a source, encoded now or taken from the cache; every rank may call this at the same time.

    Arguments:
        config: the source and how it is cut.
        cache: folder to keep results in; by default `speedlab` in XDG_CACHE_HOME or ~/.cache.
        progress: gets a line of text about once a second while this takes longer than that; None for silence.

    Raises ConfigError: unreadable, empty or binary data, a damaged token file, a sequence longer than the training or
    the held-out part, a cache that cannot be written.
    Sets TOKENIZERS_PARALLELISM where it is not set and text is encoded.
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
    """Made anew by each rank, which takes less time than reading it."""
    refuse_task(config)
    train, heldout = parts_of(config, task)
    tokenizer = NumberTokenizer(config.vocab_size)
    return Corpus(
        source=describe(config), train=train, heldout=heldout, tokenizer=tokenizer, max_token=config.vocab_size - 1
    )


def _token_files(config: DataConfig) -> list[Path]:
    """[] for text; [train] or [train, held-out] for token files, given or found in nanoGPT's folder layout."""
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
        cut = int(len(parts[0]) * (1 - config.heldout_share))
        parts = [parts[0][:cut], parts[0][cut:]]
    if end is not None:
        check_ends(parts[0], end, str(paths[0]))
    return Corpus(
        source=describe(config), train=parts[0], heldout=parts[1], tokenizer=tokenizer, max_token=largest, end=end
    )


def _tokenizer_of(config: DataConfig, path: Path, vocabulary: int) -> Tokenizer:
    """The tokenizer asked for; for 'bpe', which cannot be trained on ids, the tokenizer.json beside the file."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer != "bpe":
        return FileTokenizer(config.tokenizer)
    beside = path.parent / "tokenizer.json"
    return FileTokenizer(beside) if beside.is_file() else NumberTokenizer(vocabulary)


def _from_text(config: DataConfig, cache: Path, report: SlowProgress) -> Corpus:
    files = found.find(config)
    own = Path(config.tokenizer).expanduser() if config.tokenizer not in ("bpe", "bytes") else None
    # A tokenizer.json is known by what is in it, and must be read before anything else could fail on it.
    tokenizer = FileTokenizer(own) if own else ByteTokenizer() if config.tokenizer == "bytes" else None
    if tokenizer is not None:
        end_token(config, tokenizer)  # Before anything is encoded.
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
                corpus = _load(config, folder, tokenizer, cache, report)  # another rank may have been faster
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
    """The corpus in a folder of the cache; None when there is none, or when it is damaged and must be made again."""
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
