"""Pipelines under every schedule and stage of ZeRO against a plain loop in one process: losses and every parameter
after ten steps of SGD with momentum.

A rank returns the parameters that it holds; the test puts them together, and holds copies (of dp peers, of tied
embeddings) against each other bit by bit. Tolerances as in test_parity: what differs is the order of sums.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks.conftest import PoolOf
from ranks.pool import RanksFailed
from speedlab.comm import CommStats, Group
from speedlab.comm.process_groups import groups_of_world
from speedlab.config import ModelConfig
from speedlab.layout import Layout, layer_counts
from speedlab.models import GPT
from speedlab.offload import StoreRegistry
from speedlab.parallel.pipeline import Pipeline, cut_model
from speedlab.parallel.zero import Zero, ZeroCommGroups, plan_units
from speedlab.placement import ParamPlacement, Placement, ZeroPolicy, state_placements

VOCABULARY, LENGTH, MICRO = 29, 7, 2
ALLOWED = {"float64": (2e-6, 1e-10), "float32": (2e-6, 2e-4), "bfloat16": (2e-4, 0.01)}
"""dtype → how far apart losses may be (they are float32 in every case), and updates, as a share of the way."""


def gpt(**fields: Any) -> nn.Module:
    shape = {"vocab_size": VOCABULARY, "context": LENGTH, "layers": 6, "hidden": 12, "heads": 2}
    return GPT(ModelConfig(**{**shape, **fields}))


def untied() -> nn.Module:
    return gpt(tied=False)


def deep() -> nn.Module:
    return gpt(layers=8)


def gpt2_like() -> nn.Module:
    """What GPT-2 has and the others have not, and the whole logits."""
    return gpt(position="learned", norm="layer", bias=True, loss="full")


def llama() -> nn.Module:
    return hugging_face("llama", num_key_value_heads=1, intermediate_size=20, tie_word_embeddings=False)


def gpt2() -> nn.Module:
    return hugging_face("gpt2", attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)


def hugging_face(kind: str, **fields: Any) -> nn.Module:
    import transformers

    shape = {"hidden_size": 12, "num_hidden_layers": 6, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **shape, **ids, **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: str = "1f1b"
    stage: int = 0
    pp: int = 2
    chunks: int = 1
    build: Callable[[], nn.Module] = gpt
    micro_batches: int = 4
    cut: tuple[int, ...] | None = None
    dtype: str = "float32"
    checkpointing: bool = False
    steps: int = 10

    @property
    def counts(self) -> tuple[int, ...]:
        return self.cut or layer_counts([1] * (8 if self.build is deep else 6), self.pp * self.chunks)


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
    if case.dtype == "float64":
        model = model.double()
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
        self.index, self.dp_index = self.layout.index(self.rank, "pp"), self.layout.data_index(self.rank)
        self.traffic, device = CommStats(), torch.device("cpu")
        compute = getattr(torch, case.dtype)
        peers, line = self.layout.peers(self.rank, "dp"), self.layout.peers(self.rank, "pp")
        groups = [Group(peers, self.traffic, device, channel=name) for name in ("gather", "reduce")]
        count = case.pp * case.chunks
        self.ends = None
        if self.rank in (line[0], line[-1]):
            self.ends = Group([line[0], line[-1]], self.traffic, device, channel="ends")
        else:
            groups_of_world("ends", (self.rank,))  # Every rank makes equally many.
        names = [
            {name for name, _ in cut_model(made(case), case.counts, index).named_parameters()}
            for index in (0, count - 1)
        ]
        tied = names[0] & names[1] if self.ends else set()
        self.modules: list[Any] = [
            cut_model(made(case), case.counts, index) for index in range(self.index, count, case.pp)
        ]
        self.zeros = [
            Zero(
                module,
                plan_units(module),
                self.placement(module, tied),
                ways=ZeroCommGroups(gather=groups[0], reduce=groups[1]),
                stores=StoreRegistry(Path.cwd(), rank=self.rank, traffic=self.traffic, device=device),
                axes={"ends": self.ends} if self.ends else {},
            )
            for module in self.modules
        ]
        if case.checkpointing:
            for zero in self.zeros:
                for unit in zero.units[1:]:
                    for module in unit.modules:
                        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        self.line = Group(line, self.traffic, device, channel="pp")
        self.pipeline = Pipeline(
            self.modules,
            self.zeros,
            self.line,
            schedule=case.schedule,
            dtype=compute,
            split_backward=not case.checkpointing,
        )
        self.flats = [flat for zero in self.zeros for flat in zero.flats]
        self.momenta = [torch.zeros_like(flat.master) for flat in self.flats]

    def placement(self, module: nn.Module, tied: set[str]) -> Placement:
        """Parameters in the compute dtype, float32 masters and gradients."""
        zero_policy = ZeroPolicy.of_stage(self.case.stage, self.layout.dp)
        low = self.case.dtype not in ("float32", "float64")
        master, gradient = ({"master": "float32"}, "float32") if low else ({}, self.case.dtype)
        rows = [
            ParamPlacement(
                name=name,
                unit=plan.name,
                group=0,
                shape=tuple(p.shape),
                summed_over=("ends", "dp") if name in tied else ("dp",),
                answered_by=self.rank,
                answers=True,
                states=state_placements(zero_policy, parameter=self.case.dtype, gradient=gradient, **master),
            )
            for plan in plan_units(module)
            for name, p in plan.parameters.items()
        ]
        return Placement(rank=self.rank, zero_policy=zero_policy, rows=tuple(rows))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        micros = [batch(step, k * self.layout.dp + self.dp_index) for k in range(self.case.micro_batches)]
        tokens, targets = (torch.cat(parts) for parts in zip(*micros, strict=True))
        return tokens, targets

    def step(self, step: int) -> float:
        count = self.case.micro_batches
        losses = self.pipeline.train(
            *self.batch(step), micro_batches=count, scales=[1 / (count * self.layout.dp)] * count
        )
        self.update()
        return sum(loss.item() for loss in losses) / count

    def update(self) -> None:
        for flat, momentum in zip(self.flats, self.momenta, strict=True):
            momentum.mul_(0.9).add_(flat.gradient.update)
            flat.master.add_(momentum, alpha=-0.05)
            if (pending := flat.publish()) is not None:
                pending.wait()
        for zero in self.zeros:
            zero.clear_gradients()

    def disconnect(self) -> None:
        for part in (*self.zeros, self.line, self.ends):
            if part is not None:
                part.disconnect()

    def reconnect(self) -> None:
        for part in (*self.zeros, self.ends, self.line, self.pipeline):
            if part is not None:
                part.reconnect()

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
        outcome.evaluated = [loss.item() for loss in rank.pipeline.evaluate(*rank.batch(99))]
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
        return model(tokens, labels=targets, shift_labels=targets).loss

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
        for data in range(dp):
            micros = [batch(99, k * dp + data) for k in range(case.micro_batches)]
            outcome.evaluated.append(loss_of(*(torch.cat(parts) for parts in zip(*micros, strict=True))).item())
    outcome.parameters = [masters]
    return outcome


def compare(case: Case, by_rank: list[Outcome], plain: Outcome) -> list[str]:
    """What is wrong, a line each."""
    allowed_loss, allowed_update = ALLOWED[case.dtype]
    found: list[str] = []
    dp = len(by_rank) // case.pp
    ends = by_rank[-dp:]
    losses = [sum(values) / dp for values in zip(*(outcome.losses for outcome in ends), strict=True)]
    evaluated = [loss for pair in zip(*(outcome.evaluated for outcome in ends), strict=True) for loss in pair]
    for what, ours, theirs in (("loss", losses, plain.losses), ("evaluation", evaluated, plain.evaluated)):
        assert len(ours) == len(theirs)
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(a - b) <= allowed_loss * abs(b):
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
        separate = float((values[0] - plain.parameters[0][name]).norm() / moved)
        if not separate <= allowed_update:
            found.append(f"{name}: {separate:.3g} of its way apart")
    return found


def check(pool_of: PoolOf, size: int, cases: Sequence[Case], *, backend: str = "shared", timeout: float = 120) -> None:
    results = pool_of(size, backend).run(train_pipeline, cases, timeout=timeout)
    wrong = []
    for case, *by_rank in zip(cases, *results, strict=True):
        plain = oracle(
            pool_of, replace(case, schedule="", stage=0, checkpointing=False, cut=None, pp=1, chunks=1), size // case.pp
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
ON_TWO = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2}
"""Schedule → pipeline stages of each of two ranks."""


@pytest.mark.parametrize("schedule", ON_TWO)
def test_two_pipeline_ranks(pool_of: PoolOf, schedule: str) -> None:
    """Tied and untied, as many micro-batches as ranks and fewer, several orders of model parts."""
    plain = Case(schedule=schedule, chunks=ON_TWO[schedule])
    variants: list[dict[str, Any]] = [{}, {"build": untied}, {"build": gpt2_like, "micro_batches": 2}]
    if schedule in ("gpipe", "1f1b"):
        variants.append({"cut": (1, 5), "micro_batches": 1})
    check(pool_of, 2, [replace(plain, **variant) for variant in variants])


@pytest.mark.parametrize(("schedule", "stage"), list(zip(ON_TWO, (0, 3, 2, 1), strict=True)))
def test_a_stage_of_zero(pool_of: PoolOf, schedule: str, stage: int) -> None:
    """pp 2 × dp 2. Through the engine, schedules and stages meet in test_layouts."""
    check(pool_of, 4, [Case(schedule=schedule, chunks=ON_TWO[schedule], stage=stage)])


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ON_TWO)
def test_every_stage_of_zero(pool_of: PoolOf, schedule: str) -> None:
    """pp 2 × dp 2."""
    check(pool_of, 4, [Case(schedule=schedule, chunks=ON_TWO[schedule], stage=stage) for stage in STAGES])


@pytest.mark.parametrize("schedule", ON_TWO)
def test_four_pipeline_ranks(pool_of: PoolOf, schedule: str) -> None:
    """Cut unevenly, with a stage of a single block; several stages of each rank where the schedule has them.

    In float64, where nothing is rounding: the first norm of a deep model moves so little that float32 says nothing.
    """
    deeper = {"chunks": ON_TWO[schedule], "build": deep, "dtype": "float64"}
    plain = Case(schedule=schedule, pp=4)
    check(pool_of, 4, [replace(plain, cut=(1, 2, 2, 1)), replace(plain, **deeper)])


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.nightly), "zero-bubble"])
def test_recomputed_blocks(pool_of: PoolOf, schedule: str) -> None:
    check(pool_of, 4, [Case(schedule=schedule, stage=stage, checkpointing=True) for stage in (0, 3)])


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.nightly), "zero-bubble"])
def test_bfloat16(pool_of: PoolOf, schedule: str) -> None:
    """Untied: the plain loop adds both gradients of a tied embedding in bfloat16, the ranks add theirs in float32."""
    check(pool_of, 4, [Case(schedule=schedule, stage=stage, build=untied, dtype="bfloat16") for stage in (1, 3)])


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_models_of_transformers(pool_of: PoolOf, schedule: str) -> None:
    """Llama with grouped queries; GPT-2, whose embedding is tied and whose last layer gives a view."""
    check(pool_of, 2, [Case(schedule=schedule, build=build) for build in (llama, gpt2)])


def test_on_gloo(pool_of: PoolOf) -> None:
    check(pool_of, 2, [Case(), Case(schedule="zero-bubble", chunks=2)], backend="gloo")


# ---- failures --------------------------------------------------------------------------------------------------------


class BlockError(RuntimeError):
    """A block fails."""


def fail_in_the_middle(schedule: str, stage: int, where: str) -> None:
    """Rank 1 fails in the second micro-batch of the second step, in its forward or backward."""
    rank = Rank(Case(schedule=schedule, chunks=ON_TWO[schedule], stage=stage))
    rank.step(0)
    if rank.rank == 1:
        calls = 0

        def broken(tensor: Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise BlockError("this block fails")

        def after(module: nn.Module, args: Any, output: Tensor) -> None:
            if where == "forward":
                broken(output)
            else:
                output.register_hook(broken)

        rank.modules[-1].register_forward_hook(after)
    rank.step(1)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("interleaved", 3), ("zero-bubble", 2)])
def test_a_rank_that_fails_holds_up_nobody(pool_of: PoolOf, schedule: str, stage: int, where: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool_of(4).run(fail_in_the_middle, schedule, stage, where, timeout=60)
    kinds = {rank: failure.kind for rank, failure in caught.value.by_rank.items()}
    assert kinds == {0: "PeerLost", 1: "BlockError", 2: "PeerLost", 3: "PeerLost"}


_kept: list[Rank] = []
"""In a rank's process: what is left of a step that broke."""


def break_a_step(case: Case) -> None:
    """The first pipeline rank of the second data rank fails between two micro-batches of the second step."""
    rank = Rank(case)
    _kept[:] = [rank]
    rank.step(0)

    def fail(micro_batch: int) -> None:
        if rank.rank == 1 and micro_batch == 2:
            raise BlockError("this block fails")

    rank.pipeline._on_forward = fail
    try:
        rank.step(1)
    finally:
        rank.disconnect()


def make_it_again() -> tuple[list[float], list[dict[str, Tensor]]]:
    (rank,) = _kept
    _kept.clear()
    rank.reconnect()
    rank.pipeline._on_forward = lambda micro_batch: None
    return [rank.step(1)], rank.parameters()


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("zero-bubble", 1), ("1f1b", 2), ("interleaved", 3)])
def test_a_step_can_be_made_again(pool_of: PoolOf, schedule: str, stage: int) -> None:
    """What a broken step has left is gone: the next one gives the bits of a run that nothing happened to."""
    case = Case(schedule=schedule, chunks=ON_TWO[schedule], stage=stage, steps=2)
    with pytest.raises(RanksFailed, match="this block fails"):
        pool_of(4).run(break_a_step, case, timeout=90)  # which has let all ranks meet in a new world
    again = pool_of(4).run(make_it_again, timeout=90)
    smooth = pool_of(4).run(train_pipeline, [case], timeout=90)
    for (losses, parameters), (outcome,) in zip(again, smooth, strict=True):
        assert losses == outcome.losses[1:]
        for ours, theirs in zip(parameters, outcome.parameters, strict=True):
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


# ---- what a rank tells -----------------------------------------------------------------------------------------------


def test_timeline(pool_of: PoolOf) -> None:
    """Every action is there once, spans follow one another, and what a rank waits for is no work of its own."""
    for schedule, kinds in (("1f1b", "FB"), ("zero-bubble", "FBIW")):
        case = Case(schedule=schedule, chunks=ON_TWO[schedule], steps=2)
        for index, (outcome,) in enumerate(pool_of(4).run(train_pipeline, [case], timeout=90)):
            spans = outcome.timeline
            assert {span.action for span in spans} <= {*kinds, "wait", "send", "reduce"}
            assert {span.action for span in spans} >= {"F", "B", "wait", "send", "reduce"} - set("B" * (kinds != "FB"))
            for before, span in pairwise(spans):
                assert span.start == pytest.approx(before.start + before.seconds, abs=1e-9) or span.start > before.start
            done = {(s.action, s.stage, s.micro_batch) for s in spans if s.action in kinds}
            own = range(index // 2, 2 * case.chunks, 2)
            assert {(a, s, k) for a, s, k in done if a == "F"} == {("F", s, k) for s in own for k in range(4)}
            for number in own:
                halves = "FB" if schedule == "1f1b" or number == 0 else "FIW"
                assert {a for a, s, _ in done if s == number} == set(halves)
