"""Documents in a row of tokens: an end token closes each document, and the next document follows it.

N rows, T tokens each. If a document began in an earlier row, its positions count from 0 in this row.
"""

from __future__ import annotations

import numpy as np

from speedlab.config import ConfigError, DataConfig
from speedlab.data.tokenizer import NumberTokenizer, Tokenizer

_IGNORED = -100
"""Target that does not count in the losses of torch and transformers."""

_SCAN_TOKENS = 1 << 22

_JOINED = "or set data.documents to 'joined'"


def separated(rows: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split rows into inputs, targets and positions of separate documents.

    Positions restart at 0 after each end token. The end token itself is predicted like any token. The first token of
    the next document cannot be predicted, so its target is -100.

    Args:
        rows: (N, T + 1) integers.
        end: Token that ends a document.

    Returns:
        Inputs, targets and positions, (N, T) each.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:].copy()
    ends = inputs == end
    targets[ends] = _IGNORED
    places = np.arange(inputs.shape[1])
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(ends[:, :-1], places[1:], 0)
    # The running maximum is the index of each token's document start.
    return inputs, targets, places - np.maximum.accumulate(begins, axis=1)


def end_token(config: DataConfig, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a document if documents are separate; None if they are joined.

    Args:
        config: Source and its documents.
        tokenizer: The tokenizer of the source.

    Raises:
        ConfigError: If the tokenizer has no such token.
    """
    if config.documents == "joined":
        return None
    if tokenizer.end_of_text is not None:
        return tokenizer.end_of_text
    if isinstance(tokenizer, NumberTokenizer):
        raise ConfigError(
            f"data.documents 'separate': {config.source} is of token ids without a tokenizer, so that it is unknown "
            f"which of them ends a document; set data.tokenizer to the tokenizer.json the file was made with, {_JOINED}"
        )
    raise ConfigError(
        f"data.documents 'separate': the tokenizer of {config.source} has no token that ends a document (such as "
        f"<|endoftext|> or </s>); add one to it, {_JOINED}"
    )


def check_ends(tokens: np.ndarray, end: int, name: str) -> None:
    """Check that a document ends in `tokens`. This stops at the first end.

    Args:
        tokens: (N,) integers.
        end: Token that ends a document.
        name: Name of the tokens in the error.

    Raises:
        ConfigError: If no document ends.
    """
    for start in range(0, len(tokens), _SCAN_TOKENS):
        if (tokens[start : start + _SCAN_TOKENS] == end).any():
            return
    raise ConfigError(
        f"data.documents 'separate': token {end}, which ends a document, is nowhere in {name}; write the file with it "
        f"after each document, give the tokenizer.json it was made with as data.tokenizer, {_JOINED}"
    )


def refuse_task(config: DataConfig) -> None:
    """Raise ConfigError if documents of a synthetic task are configured as separate.

    Args:
        config: Source and its documents.
    """
    if config.documents == "separate":
        raise ConfigError(
            f"data.documents 'separate': {config.source} has no documents, each of its sequences is a row of its own; "
            "set data.documents to 'joined'"
        )
