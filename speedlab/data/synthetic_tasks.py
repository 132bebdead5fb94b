"""Synthetic tasks with known answers, for models with long contexts. `data.source` names them:

| source              | a sequence of T tokens                                     | answers                           |
|---------------------|------------------------------------------------------------|-----------------------------------|
| task:copy           | x, a mark, x again; x of (T - 1) // 2 random tokens        | all of the second x               |
| task:retrieval      | hay with a needle (a mark, a value) in it; at the end a    | that value                        |
|                     | mark and the needle's value; the needle is anywhere        |                                   |
| task:retrieval@0.25 | the same, with the needle after a quarter of the hay       | that value                        |

Token 0 is the mark. Values are drawn from the lower half of the vocabulary. Hay counts through the upper half, from a
random start in each sequence, so that in a long sequence almost only the value is unpredictable.
Each sequence is one row of the sampler, with `data.sequence_length` tokens. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from speedlab.config import ConfigError, DataConfig

_PREFIX = "task:"
_MARK = 0
_LEAST_TOKENS, _LEAST_VOCABULARY = 4, 4
_ID_BYTES = 2
_TRAIN, _HELDOUT = 0, 1


@dataclass(frozen=True)
class Task:
    """A kind of synthetic sequences.

    Attributes:
        name: Kind of the task.
        depth: Share of hay before the needle, 0 to 1; None: random for each sequence.
    """

    name: Literal["copy", "retrieval"]
    depth: float | None = None

    def samples(self, count: int, length: int, vocabulary: int, seed: int) -> np.ndarray:
        """Return sequences; the same arguments give the same sequences.

        Args:
            count: Number of sequences.
            length: Tokens of a sequence, at least 4.
            vocabulary: Number of tokens, at least 4.
            seed: Seed of the random numbers.

        Returns:
            (count, length) int64.

        Raises:
            ConfigError: If `length` or `vocabulary` is too small.
        """
        if length < _LEAST_TOKENS or vocabulary < _LEAST_VOCABULARY:
            raise ConfigError(
                f"{_PREFIX}{self.name}: data.sequence_length is {length} and the vocabulary has {vocabulary} tokens; a "
                f"task needs at least {_LEAST_TOKENS} and {_LEAST_VOCABULARY}"
            )
        random = np.random.Generator(np.random.PCG64([seed, length, vocabulary]))
        make = self._copies if self.name == "copy" else self._retrievals
        return make(random, count, length, vocabulary)

    def answers(self, length: int) -> slice:
        """Return which targets (T,) of a sequence follow from earlier tokens.

        Args:
            length: Tokens of a sequence.
        """
        half = (length - 1) // 2
        return slice(half, 2 * half) if self.name == "copy" else slice(length - 2, length - 1)

    def _copies(self, random: np.random.Generator, count: int, length: int, vocabulary: int) -> np.ndarray:
        half = (length - 1) // 2
        made = np.full((count, length), _MARK, dtype=np.int64)
        made[:, :half] = random.integers(1, vocabulary, (count, half))
        # The mark at index `half` separates both copies.
        made[:, half + 1 : 2 * half + 1] = made[:, :half]
        return made

    def _retrievals(self, random: np.random.Generator, count: int, length: int, vocabulary: int) -> np.ndarray:
        middle, places = (
            vocabulary // 2,
            length - 3,
        )  # A needle has two tokens and begins before the last two.
        start = random.integers(0, vocabulary - middle, (count, 1))
        made = middle + (start + np.arange(length)) % (vocabulary - middle)
        drawn = random.integers(0, places, count)  # Always draw, so that all depths have the same values.
        needle = drawn if self.depth is None else np.full(count, round(self.depth * (places - 1)))
        rows, values = np.arange(count), random.integers(1, middle, count)
        made[rows, needle], made[rows, needle + 1] = _MARK, values
        made[:, -2], made[:, -1] = _MARK, values
        return made


def task_of(config: DataConfig) -> Task | None:
    """Return the task that the source names; None for other sources.

    Args:
        config: Source.

    Raises:
        ConfigError: If there is no such task.
    """
    if not isinstance(config.source, str) or not config.source.startswith(_PREFIX):
        return None
    name, at, depth = config.source.removeprefix(_PREFIX).partition("@")
    if name == "copy" and not at:
        return Task("copy")
    if name == "retrieval" and not at:
        return Task("retrieval")
    if name == "retrieval" and _is_share(depth):
        return Task("retrieval", float(depth))
    raise ConfigError(
        f"data.source {config.source!r}: there is no such task; give 'task:copy', 'task:retrieval', or a depth from 0 "
        f"to 1 as 'task:retrieval@0.5'"
    )


def parts_of(config: DataConfig, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a task as (train, held-out), each (N,) uint16 or uint32.

    Sequences follow each other, `max_bytes` in all. One more token ends the targets of the last row.

    Args:
        config: Source and how it is split.
        task: The task.
    """
    count = max(2, config.max_bytes // (_ID_BYTES * config.sequence_length))
    heldout = max(1, round(count * config.heldout_share))
    made = [_joined(task, config, size, seed) for size, seed in ((count - heldout, _TRAIN), (heldout, _HELDOUT))]
    return made[0], made[1]


def accuracy(config: DataConfig, predict: Callable[[np.ndarray], np.ndarray], *, count: int = 64) -> float:
    """Return the share of correct answers in sequences that training never reads.

    Args:
        config: Source; must be a task.
        predict: Inputs (count, T) int64 -> predicted next token for each token, (count, T).
        count: Number of sequences.

    Raises:
        ConfigError: If the source is not a task.
    """
    task, length = task_of(config), config.sequence_length
    if task is None:
        raise ConfigError(f"data.source {config.source!r}: only a task has answers; give for instance 'task:retrieval'")
    inputs = task.samples(count, length, config.vocab_size, _HELDOUT)
    answers = task.answers(length)
    asked = slice(answers.start + 1, answers.stop + 1)
    return float((predict(inputs)[:, answers] == inputs[:, asked]).mean())


def _joined(task: Task, config: DataConfig, count: int, seed: int) -> np.ndarray:
    tokens = task.samples(count, config.sequence_length, config.vocab_size, seed)
    dtype = np.uint16 if config.vocab_size <= 1 << 16 else np.uint32
    joined = np.append(tokens.reshape(-1), _MARK).astype(dtype)
    joined.flags.writeable = False
    return joined


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
