"""Documents in a row of tokens: an end token closes each, and the next begins behind it.

N rows, T tokens each. Of a document whose beginning lies in an earlier row, what is here counts from 0.
"""

from __future__ import annotations

import numpy as np

from speedlab.config import ConfigError, DataConfig
from speedlab.data.tokenizer import NumberTokenizer, Tokenizer

_IGNORED = -100
"""A target that does not count, for torch's and transformers' losses."""

_SCAN_TOKENS = 1 << 22

_JOINED = "or set data.documents to 'joined'"


def separated(rows: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs, targets, positions) of `rows` (N, T + 1), (N, T) int64 each, whose documents end with token `end`.

    Positions begin anew behind each end token. That token is predicted like any other; what follows it is the next
    document's first token, which nothing foretells: there the target is -100.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:].copy()
    ends = inputs == end
    targets[ends] = _IGNORED
    places = np.arange(inputs.shape[1])
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(ends[:, :-1], places[1:], 0)
    return inputs, targets, places - np.maximum.accumulate(begins, axis=1)


def end_token(config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """The token that ends a document where documents are to be separate; None where they are joined.

    Raises ConfigError where the tokenizer knows none.
    """
    if config.documents == "joined":
        return None
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    if isinstance(tokenizer, NumberTokenizer):
        raise ConfigError(
            f"data.documents 'separate': {config.source} is of token ids without a tokenizer, so that nobody knows "
            f"which of them ends a document; set data.tokenizer to the tokenizer.json the file was made with, {_JOINED}"
        )
    raise ConfigError(
        f"data.documents 'separate': the tokenizer of {config.source} has no token that ends a document (such as "
        f"<|endoftext|> or </s>); add one to it, {_JOINED}"
    )


def check_ends(tokens: np.ndarray, end: int, name: str) -> None:
    """Raise ConfigError where no document ends in `tokens` (N,). Reads no further than the first end."""
    for start in range(0, len(tokens), _SCAN_TOKENS):
        if (tokens[start : start + _SCAN_TOKENS] == end).any():
            return
    raise ConfigError(
        f"data.documents 'separate': token {end}, which ends a document, is nowhere in {name}; write the file with it "
        f"behind each document, give the tokenizer.json it was made with as data.tokenizer, {_JOINED}"
    )


def refuse_task(config: DataConfig) -> None:
    """Raise ConfigError where documents of a synthetic task are to be separate."""
    if config.documents == "separate":
        raise ConfigError(
            f"data.documents 'separate': {config.source} has no documents, each of its sequences is a row of its own; "
            "set data.documents to 'joined'"
        )
