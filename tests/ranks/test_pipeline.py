"""Pipelines under every schedule and stage of ZeRO against a plain loop in one process: losses and every parameter
after ten steps of SGD with momentum.

A rank returns the parameters that it holds; the test puts them together, and holds copies (of dp peers, of tied
embeddings) against each other bit by bit. Tolerances as in test_parity: what differs is the order of float32 sums.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks.conftest import PoolOf
from speedlab.comm import Group, Traffic
from speedlab.config import ModelConfig
from speedlab.layout import Layout
from speedlab.models import GPT
from speedlab.parallel.pipeline import Pipeline, cut_model
from speedlab.parallel.zero import Residency, Zero, plan_units

VOCABULARY, LENGTH, MICRO = 29, 7, 2
LOSS, UPDATE = 2e-6, 2e-4
LOW_LOSS, LOW_UPDATE = 2e-4, 0.01
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]


def gpt(**fields: Any) -> nn.Module:
    return GPT(ModelConfig(vocab_size=VOCABULARY, context=LENGTH, layers=4, hidden=12, heads=2, **fields))


def hugging_face(kind: str) -> nn.Module:
    import transformers

    shape: dict[str, Any] = {
        "llama": {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4, "num_attention_heads": 2},
        "gpt2": {"n_embd": 12, "n_layer": 4, "n_head": 2, "n_positions": LENGTH, "attn_pdrop": 0, "resid_pdrop": 0},
    }[kind]
    if kind == "llama":
        shape |= {"num_key_value_heads": 1, "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
    else:
        shape |= {"embd_pdrop": 0}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **shape, **ids)
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str
    stage: int = 0
    pp: int = 2
    build: Callable[[], nn.Module] = gpt
    micro_batches: int = 4
    counts: tuple[int, ...] | None = None
    dtype: str = "float32"
    checkpointing: bool = False
    steps: int = 10

    @property
    def chunks(self) -> int:
        return 2 if self.schedule in ("interleaved", "zero-bubble") and self.pp == 2 else 1

    @property
    def cut(self) -> tuple[int, ...]:
        return self.counts or (4 // (self.pp * self.chunks),) * (self.pp * self.chunks)


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    timeline: list[Any] = field(default_factory=list)


def made(case: Case) -> nn.Module:
    """The same model on every rank; with values that bfloat16 holds, where it is used."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = case.build()
    if case.dtype == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    return model


def batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(VOCABULARY, (MICRO, LENGTH + 1), generator=generator)
    return rows[:, :-1].contiguous(), (rows[:, 1:] + rows[:, :-1]) % VOCABULARY


class Rank:
    """What the engine does for a pipeline, as plainly as can be: stages, their Zeros, SGD with momentum on masters."""

    def __init__(self, case: Case) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.layout = Layout.for_world(dist.get_world_size(), pp=case.pp)
        self.index, self.dp_index, _ = self.layout.coordinates(self.rank)
        self.traffic, device = Traffic(), torch.device("cpu")
        compute = getattr(torch, case.dtype)
        peers, line = self.layout.dp_peers(self.rank), self.layout.pp_peers(self.rank)
        groups = [Group(peers, self.traffic, device, channel=name) for name in ("gather", "reduce")]
        count = case.pp * case.chunks
        self.ends = None
        if self.rank in (line[0], line[-1]):
            self.ends = Group([line[0], line[-1]], self.traffic, device, channel="ends")
        names = [
            {name for name, _ in cut_model(made(case), case.cut, index).named_parameters()} for index in (0, count - 1)
        ]
        shared = {name: [self.ends] for name in names[0] & names[1] if self.ends}
        self.modules: list[Any] = [
            cut_model(made(case), case.cut, index) for index in range(self.index, count, case.pp)
        ]
        self.zeros = [
            Zero(
                module,
                plan_units(module),
                groups={},
                gather_group=groups[0],
                reduce_group=groups[1],
                compute_dtype=compute,
                gradient_dtype=torch.float32,
                residency=Residency.of_stage(case.stage, self.layout.dp),
                shared=shared,
            )
            for module in self.modules
        ]
        if case.checkpointing:
            for zero in self.zeros:
                for unit in zero.units[1:]:
                    for module in unit.modules:
                        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        self.pipeline = Pipeline(
            self.modules,
            self.zeros,
            schedule=case.schedule,
            layout=self.layout,
            rank=self.rank,
            device=device,
            dtype=compute,
            traffic=self.traffic,
            split_backward=not case.checkpointing,
        )
        self.flats = [flat for zero in self.zeros for flat in zero.flats]
        self.momenta = [torch.zeros_like(flat.master) for flat in self.flats]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        micros = [batch(step, k * self.layout.dp + self.dp_index) for k in range(self.case.micro_batches)]
        tokens, targets = (torch.cat(parts) for parts in zip(*micros, strict=True))
        return tokens, (targets if isinstance(self.modules[0], GPT) else tokens)

    def step(self, step: int) -> float:
        count = self.case.micro_batches
        losses = self.pipeline.train(*self.batch(step), micro_batches=count, scale=1 / (count * self.layout.dp))
        self.update()
        return sum(loss.item() for loss in losses) / count

    def update(self) -> None:
        for flat, momentum in zip(self.flats, self.momenta, strict=True):
            momentum.mul_(0.9).add_(flat.update_gradient)
            flat.master.add_(momentum, alpha=-0.05)
            if (pending := flat.publish()) is not None:
                pending.wait()
        for zero in self.zeros:
            zero.clear_gradients()

    def parameters(self) -> list[dict[str, Tensor]]:
        """Those of each of this rank's stages."""
        found = []
        for zero in self.zeros:
            wholes = [(flat, flat.whole_master()) for flat in zero.flats]
            found.append(
                {s.name: w[s.offset :][: s.numel].view(s.shape).clone() for flat, w in wholes for s in flat.slots}
            )
        return found


def train_pipeline(cases: Sequence[Case]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        rank, outcome = Rank(case), Outcome()
        for step in range(case.steps):
            outcome.losses.append(rank.step(step))
        outcome.timeline = rank.pipeline.timeline
        for module in rank.modules:
            module.eval()
        outcome.evaluated = [loss.item() for loss in rank.pipeline.evaluate(*rank.batch(99), micro_batches=2)]
        outcome.parameters = rank.parameters()
        outcomes.append(outcome)
    return outcomes


def train_plain(case: Case, dp: int) -> Outcome:
    """The oracle. In low precision the model computes in it and float32 masters are updated."""
    model, compute = made(case), getattr(torch, case.dtype)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: torch.zeros_like(p) for name, p in masters.items()}
    model = model.to(compute)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        if isinstance(model, GPT):
            return model(tokens, targets).loss
        return model(tokens, labels=tokens).loss

    outcome = Outcome()
    count = case.micro_batches * dp
    for step in range(case.steps):
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        outcome.losses.append(0.0)
        for index in range(count):
            loss = loss_of(*batch(step, index))
            (loss / count).backward()
            outcome.losses[-1] += loss.item() / count
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] += p.grad
                p.grad = None
        with torch.no_grad():
            for name, p in model.named_parameters():
                momenta[name].mul_(0.9).add_(sums[name])
                p.copy_(masters[name].add_(momenta[name], alpha=-0.05))
    model.eval()
    with torch.no_grad():
        for half in range(2):
            for data in range(dp):
                numbers = [k * dp + data for k in range(case.micro_batches)][half * case.micro_batches // 2 :]
                micros = [batch(99, index) for index in numbers[: case.micro_batches // 2]]
                outcome.evaluated.append(loss_of(*(torch.cat(p) for p in zip(*micros, strict=True))).item())
    outcome.parameters = [masters]
    return outcome


def compare(case: Case, by_rank: list[Outcome], plain: Outcome) -> list[str]:
    """What is wrong, a line each."""
    low = case.dtype != "float32"
    found: list[str] = []
    dp = len(by_rank) // case.pp
    ends = by_rank[-dp:]
    losses = [sum(values) / dp for values in zip(*(outcome.losses for outcome in ends), strict=True)]
    evaluated = [loss for pair in zip(*(outcome.evaluated for outcome in ends), strict=True) for loss in pair]
    for what, ours, theirs in (("loss", losses, plain.losses), ("evaluation", evaluated, plain.evaluated)):
        assert len(ours) == len(theirs)
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(a - b) <= (LOW_LOSS if low else LOSS) * abs(b):
                found.append(f"{what} {k}: {a:.8g} instead of {b:.8g}")
                break
    copies: dict[str, list[Tensor]] = defaultdict(list)
    for outcome in by_rank:
        for held in outcome.parameters:
            for name, value in held.items():
                copies[name].append(value)
    start = {name: p.detach() for name, p in made(case).named_parameters()}
    if copies.keys() != start.keys():
        found.append(f"parameters {sorted(copies.keys() ^ start.keys())} are missing or made up")
    for name, values in copies.items():
        if not all(torch.equal(value, values[0]) for value in values):
            found.append(f"{name}: its {len(values)} copies differ")
        moved = (plain.parameters[0][name] - start[name]).norm()
        apart = float((values[0] - plain.parameters[0][name]).norm() / moved)
        if not apart <= (LOW_UPDATE if low else UPDATE):
            found.append(f"{name}: {apart:.3g} of its way apart")
    return found


def check(pool_of: PoolOf, size: int, cases: Sequence[Case], *, backend: str = "shared", timeout: float = 120) -> None:
    results = pool_of(size, backend).run(train_pipeline, cases, timeout=timeout)
    wrong = []
    for case, *by_rank in zip(cases, *results, strict=True):
        plain = oracle(
            pool_of, replace(case, schedule="", stage=0, checkpointing=False, counts=None, pp=1), size // case.pp
        )
        wrong += [f"[{case}] {line}" for line in compare(case, by_rank, plain)]
    assert not wrong, "\n".join(wrong)


_oracles: dict[tuple[Case, int], Outcome] = {}


def oracle(pool_of: PoolOf, case: Case, dp: int) -> Outcome:
    """The plain loop's outcome, computed once, in a process set up as the ranks are."""
    if (case, dp) not in _oracles:
        _oracles[case, dp] = pool_of(1).run(train_plain, case, dp)[0]
    return _oracles[case, dp]


STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_pipeline_ranks(pool_of: PoolOf, schedule: str) -> None:
    check(pool_of, 2, [Case(schedule=schedule), Case(schedule=schedule, build=untied)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_every_stage_of_zero(pool_of: PoolOf, schedule: str) -> None:
    """pp 2 × dp 2; of several stages on a rank, too."""
    check(pool_of, 4, [Case(schedule=schedule, stage=stage) for stage in STAGES])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_pipeline_ranks(pool_of: PoolOf, schedule: str) -> None:
    check(pool_of, 4, [Case(schedule=schedule, pp=4), Case(schedule=schedule, pp=4, build=untied)])


def untied() -> nn.Module:
    return gpt(tied=False)
