"""Tokenizers: byte-level BPE that is trained here, plain bytes, a tokenizer.json, or bare numbers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from speedlab.config import ConfigError

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>")


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id that `encode` returns is below this number."""
        ...

    @property
    def end_of_text(self) -> int | None:
        """Id that separates two texts, or None."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, (N,) int64."""
        ...

    def to_json(self) -> str | None:
        """Return a tokenizer.json of the `tokenizers` package; None if ids have no text."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a text."""

    vocab_size = 257
    end_of_text: int | None = 256

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids. Invalid UTF-8 becomes U+FFFD.

        Args:
            ids: Ids from 0 to 256.

        Raises:
            ValueError: If an id is outside the vocabulary.
        """
        if any(not 0 <= i < self.vocab_size for i in ids):
            raise ValueError(f"ids from {min(ids)} to {max(ids)} are not all below {self.vocab_size}")
        data = b"".join(END_OF_TEXT.encode() if i == self.end_of_text else bytes((i,)) for i in ids)
        return data.decode(errors="replace")

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the bytes of each text, (N,) int64."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def to_json(self) -> str:
        """Return a byte-level BPE without merges."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        # The package writes a visible byte as itself, and the other bytes as characters from 256 on, in order.
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
        model = models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[])
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer.to_str()


class NumberTokenizer:
    """Shows and reads ids as numbers with spaces, for token files without a tokenizer."""

    end_of_text: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of numbers.

        Args:
            text: Numbers separated by whitespace.

        Raises:
            ConfigError: If the text has anything but ids of the vocabulary.
        """
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise ConfigError(
                f"the token file has no tokenizer, so a text must be ids below {self.vocab_size:,} such as '17 4 256'; "
                f"to use words, set data.tokenizer to the tokenizer.json the file was made with"
            )
        return [int(word) for word in words]

    def decode(self, ids: list[int]) -> str:
        """Return the ids as text, separated by spaces."""
        return " ".join(map(str, ids))

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, (N,) int64."""
        return [np.array(self.encode(text), dtype=np.int64) for text in texts]

    def to_json(self) -> None:
        """Return None: ids have no text."""
        return None


class FileTokenizer:
    """A tokenizer.json in the format of the `tokenizers` package.

    Raises:
        ConfigError: If the file cannot be read or holds no tokenizer; names the file.
    """

    def __init__(self, path: str | Path) -> None:
        import tokenizers

        path = Path(path).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"{path}: cannot be read as a tokenizer: {reason}; {_TOKENIZER_CHOICES}") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises a plain Exception for every malformed file
            raise ConfigError(f"{path}: holds no tokenizer: {error}; {_TOKENIZER_CHOICES}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Not get_vocab_size(): ids may have gaps, and an embedding must hold the largest id.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ConfigError(f"{path}: holds no tokenizer: its vocabulary is empty; {_TOKENIZER_CHOICES}")
        ends = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        self.end_of_text = next((i for i in ends if i is not None), None)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, with special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, (N,) int64."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def to_json(self) -> str:
        """Return the content of the tokenizer.json."""
        return self._tokenizer.to_str()


_TOKENIZER_CHOICES = "data.tokenizer takes 'bpe', 'bytes', or the path of a tokenizer.json"


def train_bpe(texts: list[str], vocab_size: int, path: Path) -> FileTokenizer:
    """Train byte-level BPE and write it to `path`. Every text can be encoded, and decodes to itself.

    Args:
        texts: Training texts.
        vocab_size: Largest size of the vocabulary; smaller if the texts hold too few different pairs.
        path: File to write.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Without a prefix space, every text decodes to itself.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return FileTokenizer(path)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers' `AutoTokenizer.from_pretrained` reads. Bare numbers write nothing.

    Args:
        tokenizer: Tokenizer to write.
        folder: Output folder.
    """
    text = tokenizer.to_json()
    if text is None:
        return
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if tokenizer.end_of_text is not None:
        config["eos_token"] = tokenizer.decode([tokenizer.end_of_text])
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def parallel_tokenizing() -> Iterator[None]:
    """Let `tokenizers` use all threads inside this context, and none afterwards, unless TOKENIZERS_PARALLELISM is set.

    The variable stays set afterwards: without it, a forking process prints a warning, and a fork of a process with an
    active thread pool may hang.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ[name] = "false"
