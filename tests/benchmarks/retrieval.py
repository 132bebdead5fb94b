"""`python -m tests.benchmarks retrieval`: what sparse attention loses beside dense: answers that lie far back, and
held-out loss.

1. A small GPT learns `task:retrieval`, first on short sequences, then on ones twice as long, up to the full length. The
   sparse side's runs of tokens grow along: a pattern has no weights. Positions jump within a short sequence, so that
   those of the full length are known before a sequence is as long (arXiv:2309.10400).
2. What both sides answer in sequences of the full length that no training saw.
3. Both sides read the Python library's sources for some steps; their loss on files that were held out.

The pattern is "fixed" (arXiv:1904.10509): a query sees its own run of tokens, and the last block of every earlier run.
What lies anywhere else comes to it in two layers, by way of these blocks. Everything else of the sides is the same:
values that training begins with, sequences, steps at most. Each side has a process with one thread; no engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from speedlab.calibrate.rank_processes import RankSet
from speedlab.calibrate.table import BenchRow, report
from speedlab.config import AttentionConfig, DataConfig, ModelConfig
from speedlab.config.command_line import read_options
from speedlab.data import Sampler, Task, prepare
from speedlab.models import GPT
from speedlab.models.gpt import GPTBlock, Positions, SparseAttend

DENSE, SPARSE = "dense", "sparse"
GOALS = {"points": 2.0, "percent": 2.0}
"""At most: of accuracy below dense attention's, and of held-out loss above it."""

_SIZES = ModelConfig(layers=3, hidden=64, heads=4, ffn_hidden=128, context=1 << 24)
"""Of the task's models and the text's."""

_TASK, _TASK_VOCABULARY = Task("retrieval"), 64
_SHORTEST, _SHORTEST_RUN, _BLOCK, _ROWS = 64, 32, 64, 64
_TOKENS = 16384
"""Of a step of the task on long sequences; of short ones there are 64."""
_RATE, _WARM_UP, _BETAS, _CLIP_NORM = 4e-3, 30, (0.9, 0.98), 1.0
_RATE_LENGTH = 256
"""Tokens up to which the rate is the full one; it falls with the root of longer lengths, whose batches are smaller."""
_LEARNED, _LAST = 0.03, 12
"""A stage ends once the mean loss of so many steps is below."""
_TAUGHT = 90.0
"""Per cent of dense attention's answers that are right, at least, for others to be held against them."""
_JUMPS = 4
_TEXT_VOCABULARY, _TEXT_ROWS, _TEXT_BATCHES = 1024, 4, 8
_HELD_OUT_SEED, _SEEDS_SEPARATE = 1, 100_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Accuracy of retrieval and held-out loss, block-sparse attention with blocks that all see beside dense."""

    length: int = 16384
    """Tokens of the sequences in which answers are looked for."""
    sequences: int = 32
    """Of these, for each seed."""
    window: int = 512
    """Tokens of a run."""
    most: int = 300
    """Steps of a length at most; those that have learned it go on earlier."""
    text_length: int = 2048
    """Tokens of the sequences of text."""
    text_steps: int = 150
    """Steps on text; none leave it out."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each gives initial values and sequences."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a training: sequences of one length."""

    length: int
    attention: AttentionConfig
    rows: int
    rate: float


class JumpingPositions(Positions):
    """Positions of a short sequence that jump forwards at a few places, so that any up to `reach` is met in training.

    Of `reach` tokens or more, and in evaluation, they are 0, 1, 2 and so on.
    """

    def __init__(self, reach: int, seed: int) -> None:
        super().__init__()
        self.reach, self.random = reach, torch.Generator().manual_seed(seed)

    def forward(self, length: int, device: torch.device, given: Tensor | None = None) -> Tensor:
        positions = super().forward(length, device, given)
        free = self.reach - length
        if not self.training or free <= 0:
            return positions
        jumped = torch.randint(free + 1, (_JUMPS,), generator=self.random).sort().values  # In all, behind each place.
        places = torch.randint(length, (_JUMPS,), generator=self.random).sort().values
        passed = torch.searchsorted(places, positions, right=True)  # How many places lie at or before a token.
        return positions + torch.cat([torch.zeros(1, dtype=torch.int64), jumped])[passed]


def main(argv: list[str] | None = None) -> None:
    options = read_options(Options, argv, "python -m tests.benchmarks retrieval")
    if options.length < 4 * _SHORTEST or options.window % _BLOCK:
        sys.exit(
            f"bench retrieval: length {options.length}, window {options.window}; give at least {4 * _SHORTEST} tokens, "
            f"and a window of whole blocks of {_BLOCK}"
        )
    found = measured(options)
    report(found, options.json)
    print("\n".join(map(reported, found)))


def reported(row: BenchRow) -> str:
    """By how much the sparse side is worse, and whether the goal is met: by answers only where dense attention has
    learned the task."""
    assert row.peer is not None  # All have one.
    points = row.unit == "% right"
    if points and row.peer < _TAUGHT:
        return f"{row.case}: dense attention has learned too little ({row.peer:.0f} % right); raise --most: MISSED"
    worse = row.peer - row.ours if points else 100 * (row.ours / row.peer - 1)
    goal = GOALS["points" if points else "percent"]
    verdict = "met" if worse <= goal else "MISSED"
    what = "points of accuracy below" if points else "% of held-out loss above"
    return f"{row.case}: {worse:+.2f} {what} dense, goal {goal:g}: {verdict}"


def stages(length: int, window: int, sparse: bool) -> list[Stage]:
    """Of the task, from short to `length` in sequences twice as long as those before; runs of tokens grow to
    `window`."""
    made, tokens = [], _SHORTEST
    while tokens < 2 * length:
        tokens = min(tokens, length)
        run = window if tokens == length else min(window, max(_SHORTEST_RUN, tokens // 4))
        made.append(
            Stage(
                length=tokens,
                attention=pattern(run) if sparse else AttentionConfig(),
                rows=min(_ROWS, max(1, _TOKENS // tokens)),
                rate=_RATE * min(1.0, (_RATE_LENGTH / tokens) ** 0.5),
            )
        )
        tokens *= 2
    return made


def pattern(run: int) -> AttentionConfig:
    """Runs of so many tokens, of each of which the last block is seen by all behind it."""
    block = min(_BLOCK, run // 2)
    return AttentionConfig(kind="block_sparse", pattern="fixed", window=run, global_blocks=1, block=block)


# ---- what is measured ------------------------------------------------------------------------------------------------


def measured(options: Options) -> list[BenchRow]:
    """A row of retrieval and, where there are steps on it, one of text."""
    case = f"retrieval at {options.length:,} tokens, runs of {options.window}"
    accuracies = _alongside(retrieve, options)
    ratios = [own / peer if peer else 1.0 for own, peer in zip(accuracies[SPARSE], accuracies[DENSE], strict=True)]
    found = [_row(case, "% right", accuracies, ratios)]
    if options.text_steps:
        case = f"held-out loss at {options.text_length:,} tokens, runs of {options.window}, {options.text_steps} steps"
        prepare(_text_data(options), progress=say)  # Once, before both sides ask for it.
        losses = _alongside(read, options)
        ratios = [peer / own for own, peer in zip(losses[SPARSE], losses[DENSE], strict=True)]
        found.append(_row(case, "nats", losses, ratios))
    return found


def _alongside(work: Callable[[Options, int, bool], float], options: Options) -> dict[str, list[float]]:
    """What `work` finds of each side, by seed: both at a time, so that two cores are used."""
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(RankSet(1)) for name in (DENSE, SPARSE)}
        pool = stack.enter_context(ThreadPoolExecutor(len(ranks)))

        def all_seeds(name: str) -> list[float]:
            return [ranks[name].call(work, options, seed, name == SPARSE) for seed in options.seeds]

        return dict(zip(ranks, pool.map(all_seeds, ranks), strict=True))


def retrieve(options: Options, seed: int, sparse: bool) -> float:
    """Per cent of answers that are right after training."""
    began = time.monotonic()
    model = learn(options, seed, sparse=sparse)
    taught = time.monotonic() - began
    found = 100 * answered(model, options.length, options.sequences)
    asked = time.monotonic() - began - taught
    say(f"seed {seed}, {_name(sparse)}: {found:.1f} % right ({taught:.0f} s to learn, {asked:.0f} s to answer)")
    return found


def read(options: Options, seed: int, sparse: bool) -> float:
    """Held-out loss after some steps on the Python library's sources, nats a token."""
    began = time.monotonic()
    corpus = prepare(_text_data(options), progress=say)
    train, heldout = (Sampler(part, options.text_length, seed) for part in (corpus.train, corpus.heldout))
    model = _made(_TEXT_VOCABULARY, pattern(options.window) if sparse else AttentionConfig(), seed)
    _train(model, (_pairs(train, step) for step in range(options.text_steps)), _RATE / 2)
    with torch.no_grad():
        found = statistics.mean(float(_loss(model, *_pairs(heldout, number))) for number in range(_TEXT_BATCHES))
    say(f"seed {seed}, {_name(sparse)}: held-out loss {found:.4f} ({time.monotonic() - began:.0f} s)")
    return found


def _text_data(options: Options) -> DataConfig:
    return DataConfig(vocab_size=_TEXT_VOCABULARY, sequence_length=options.text_length)


def _name(sparse: bool) -> str:
    return SPARSE if sparse else DENSE


def _row(case: str, unit: str, values: dict[str, list[float]], ratios: list[float]) -> BenchRow:
    own, peer = values[SPARSE], values[DENSE]
    return BenchRow(
        case=case,
        ours=statistics.mean(own),
        unit=unit,
        peer_name=DENSE,
        peer=statistics.mean(peer),
        ratio=statistics.mean(ratios),
        ratio_range=(min(ratios), max(ratios)),
        n=len(own),
        spread=(max(own) - min(own)) / statistics.median(own) if statistics.median(own) else None,
    )


def learn(options: Options, seed: int, *, sparse: bool) -> GPT:
    """A model that has learned the task on sequences up to the full length, in the end by the final pattern."""
    model = _made(_TASK_VOCABULARY, pattern(options.window) if sparse else AttentionConfig(), seed)
    model.places = JumpingPositions(options.length, seed)
    assert model.rotary is not None  # The default.
    model.rotary.positions = model.places
    optimizer = _optimizer(model)
    for number, stage in enumerate(stages(options.length, options.window, sparse)):
        first = _HELD_OUT_SEED + 1 + seed * _SEEDS_SEPARATE + number * options.most
        taught = _taught(stage, first, options.most)
        model.places.reach = 0 if number == 0 else options.length  # First of all without jumps.
        if sparse:
            see(model, stage.attention)
        warm_up = _WARM_UP if number == 0 else 0
        steps, loss = _train(model, taught, stage.rate, optimizer, until=_LEARNED, warm_up=warm_up)
        say(f"seed {seed}, {_name(sparse)}: {stage.length:,} tokens, {steps} steps, loss {loss:.3f}")
    return model


def see(model: GPT, attention: AttentionConfig) -> None:
    """From now on the model sees by this pattern; its weights stay."""
    for block in model.blocks:
        assert isinstance(block, GPTBlock)
        block.attention.attend = SparseAttend(attention)


def answered(model: GPT, length: int, count: int, depth: float | None = None) -> float:
    """The share (0 to 1) of right answers in `count` sequences that no training saw. `depth`: of the needle in each."""
    model.eval()
    right = 0
    task = replace(_TASK, depth=depth)
    for row in torch.from_numpy(task.samples(count, length, _TASK_VOCABULARY, _HELD_OUT_SEED)).split(1):
        with torch.no_grad():
            right += int(model(row[:, :-1]).logits[0, -1].argmax() == row[0, -1])
    return right / count


# ---- training --------------------------------------------------------------------------------------------------------


def _made(vocabulary: int, attention: AttentionConfig, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(_SIZES.model_copy(update={"vocab_size": vocabulary, "attention": attention}))


def _taught(stage: Stage, first_seed: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step; the answer alone counts."""
    for seed in range(first_seed, first_seed + most):
        rows = torch.from_numpy(_TASK.samples(stage.rows, stage.length, _TASK_VOCABULARY, seed))
        targets = torch.full_like(rows[:, 1:], -100)
        answers = _TASK.answers(stage.length)
        targets[:, answers] = rows[:, 1:][:, answers]
        yield rows[:, :-1], targets


def _pairs(sampler: Sampler, step: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(sampler.rows(step, _TEXT_ROWS, 0, _TEXT_ROWS))
    return rows[:, :-1], rows[:, 1:]


def _optimizer(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_RATE, betas=_BETAS, weight_decay=0.0)


def _train(
    model: GPT,
    batches: Iterator[tuple[Tensor, Tensor]],
    rate: float,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    until: float = 0.0,
    warm_up: int = _WARM_UP,
) -> tuple[int, float]:
    """Steps made, and the mean loss of the last ones: through all batches, or until that loss is below `until`."""
    optimizer, recent = optimizer or _optimizer(model), deque[float](maxlen=_LAST)
    model.train()
    step = 0
    for step, (tokens, targets) in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / max(1, warm_up))
        loss = _loss(model, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        recent.append(float(loss.detach()))
        if len(recent) == _LAST and statistics.mean(recent) < until:
            break
    return step, statistics.mean(recent)


def _loss(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    loss = model(tokens, targets).loss
    assert loss is not None  # There are targets.
    return loss


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
