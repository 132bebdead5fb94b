"""The engine on a GPU that is made up (see fake_cuda): no tensor of the CPU meets one of the GPU, no memory is read that
was given up, and the host waits for the device once a step.

A session trains two steps, evaluates, goes through all other ZeRO stages with a step in each, makes a record of every
step, and saves in the background. Each is seen from one rank, on which the other ranks' parts are shapes only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fake_cuda import CUDA, Collective, FakeCudaError, FakeGpu, Wait, fake_cuda
from torch import Tensor

import speedlab
from speedlab.comm import Group
from speedlab.config import ModelConfig
from speedlab.engine.engine import Engine
from speedlab.layout import Layout
from speedlab.models import GPT

MICRO, LENGTH, ACCUMULATION = 2, 8, 2


@dataclass(frozen=True, kw_only=True)
class Session:
    """A training as one rank sees it."""

    layout: Layout
    rank: int
    stage: int = 0
    stages: tuple[int, ...] = (1, 2, 3, 0)
    """Those that it goes on to."""
    dtype: str = "bfloat16"
    loss: str = "chunked"
    schedule: str = "1f1b"
    sequence: bool = False
    checkpointing: str = "none"
    dropout: float = 0.0
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def __str__(self) -> str:
        shape = f"pp{self.layout.pp}-dp{self.layout.dp}-tp{self.layout.tp}"
        pipeline = f"-{self.schedule}" if self.layout.pp > 1 else ""
        return f"{shape}{pipeline}-rank{self.rank}-zero{self.stage}-{self.dtype}-{self.loss}"

    def model(self) -> GPT:
        layers = 4 if self.schedule in ("interleaved", "zero-bubble") else 2
        shape = {"layers": layers, "hidden": 16, "heads": 2, "ffn_hidden": 24, "vocab_size": 29, "context": LENGTH}
        return GPT(ModelConfig(**shape, loss=self.loss, dropout=self.dropout))

    def config(self) -> dict[str, Any]:
        parallel = {"tp": self.layout.tp, "pp": self.layout.pp, "schedule": self.schedule, "sequence": self.sequence}
        return {
            "zero": {"stage": self.stage, "bucket_bytes": 1},
            "precision": {"dtype": self.dtype},
            "parallel": parallel,
            "activation": {"checkpointing": self.checkpointing},
            "batch": {"micro_size": MICRO, "accumulation": ACCUMULATION},
        }


@dataclass(kw_only=True)
class Part:
    """What happened in one part of a session."""

    name: str
    waits: list[Wait]
    pageable: list[Wait]
    collectives: list[Collective]
    emptied: int


@dataclass(kw_only=True)
class Report:
    """What happened in a session, up to the error that ended it, if one did."""

    parts: list[Part] = field(default_factory=list)
    error: Exception | None = None

    def of(self, kind: str) -> list[Part]:
        """Raises the session's error: what it did before is not the whole story."""
        if self.error is not None:
            raise self.error
        return [part for part in self.parts if part.name.split()[0] == kind]


@cache
def report_of(session: Session) -> Report:
    report = Report()
    with TemporaryDirectory() as folder, fake_cuda(rank=session.rank, world_size=session.layout.world_size) as gpu:
        try:
            for name in _session(session, gpu, Path(folder)):
                seen = gpu.seen
                report.parts.append(
                    Part(
                        name=name,
                        waits=[*seen.waits],
                        pageable=[*seen.pageable],
                        collectives=[*seen.collectives],
                        emptied=seen.emptied,
                    )
                )
                seen.clear()
        except Exception as error:
            report.error = error
    return report


def _session(session: Session, gpu: FakeGpu, folder: Path) -> Iterator[str]:
    """Yields the name of each part when it is over."""
    engine = make_engine(session, gpu)
    yield "initialize"
    for step in range(2):
        engine.train_batch(micro_batches(engine))
        yield f"step {step}"
        record(engine)
        yield f"record {step}"
    engine.evaluate(micro_batches(engine))
    yield "evaluate"
    for stage in session.stages:
        engine.reshape(zero=stage)
        yield f"reshape {stage}"
        engine.train_batch(micro_batches(engine))
        yield f"step at {stage}"
    hidden = folder / ".tag.partial"
    if session.rank > 0:
        hidden.mkdir()  # As the first rank would.
    engine.save_checkpoint(folder, "tag", wait=False)
    yield "save"
    end_save(engine, hidden)


def make_engine(session: Session, gpu: FakeGpu) -> Engine:
    gpu.meta_is_cuda = False
    engine = speedlab.initialize(
        model=session.model, config=session.config(), optimizer=session.optimizer, device=CUDA
    )[0]
    gpu.meta_is_cuda = True
    return engine


def micro_batches(engine: Engine) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.zeros(MICRO, LENGTH, dtype=torch.int64)
    return [(tokens, tokens) for _ in range(engine.accumulation)]


def record(engine: Engine) -> None:
    """What a run asks for after each step."""
    engine.clock.take()
    engine.ledger()
    if engine.pipeline is not None:
        assert engine.pipeline.timeline is not None


def end_save(engine: Engine, hidden: Path) -> None:
    """Its peers' parts will never come: whoever waits for them hears that there will be none."""
    for other in ("failed", *(f"rank-{rank}" for rank in range(engine.world.size) if rank != engine.world.rank)):
        (hidden / f"{other}.json").write_text('{"error": "the test is over"}')
    assert engine.saving is not None
    engine.saving.join(20.0)
    assert engine.saving.done


# ---- sessions --------------------------------------------------------------------------------------------------------

TORCHS_ADAMW = torch.optim.AdamW  # Named, so that a session that uses an instance of it can be told from others.


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    """torch's own kernel: amsgrad is an option that ours does not have."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True, amsgrad=True)


DP = Layout(dp=2)
DP_TP = Layout(dp=2, tp=2)
PP_DP = Layout(pp=2, dp=2)
ALL = Layout(pp=2, dp=2, tp=2)

SESSIONS = [
    Session(layout=DP, rank=0, dtype="float32"),
    Session(layout=DP, rank=1, dtype="float16", stage=3, stages=(0,), loss="full", checkpointing="block", dropout=0.1),
    Session(layout=DP, rank=1, dtype="bfloat16", stage=1, stages=(3, 2), optimizer=fused_adamw),
    Session(layout=DP_TP, rank=0, dtype="float32", stage=3, stages=(0,)),
    Session(layout=DP_TP, rank=1, dtype="bfloat16", loss="full", sequence=True, stages=(2, 1)),
    Session(layout=DP_TP, rank=2, dtype="float16", stages=(3,), dropout=0.1),
    Session(layout=DP_TP, rank=3, dtype="bfloat16", stage=2, stages=()),
    Session(layout=PP_DP, rank=0, dtype="bfloat16"),
    Session(layout=PP_DP, rank=1, dtype="float32", stage=2, stages=(), loss="full"),
    Session(layout=PP_DP, rank=2, dtype="float16", stage=1, stages=(3,)),
    Session(layout=PP_DP, rank=3, dtype="bfloat16", loss="full", stages=(1,)),
    Session(layout=PP_DP, rank=0, schedule="gpipe", stage=3, stages=()),
    Session(layout=PP_DP, rank=3, schedule="gpipe", stage=3, stages=(), dtype="float32"),
    Session(layout=PP_DP, rank=0, schedule="interleaved", stage=3, stages=(1,)),
    Session(layout=PP_DP, rank=3, schedule="interleaved", stage=1, stages=(3,), dtype="float16"),
    Session(layout=PP_DP, rank=0, schedule="zero-bubble", stage=2, stages=()),
    Session(layout=PP_DP, rank=3, schedule="zero-bubble", stage=3, stages=(0,), dtype="float32", loss="full"),
    *(Session(layout=ALL, rank=rank, stage=1 + rank % 2 * 2, stages=()) for rank in (0, 3, 5, 6)),
]


def sessions(*marks: tuple[Callable[[Session], bool], str]) -> Any:
    """Every session as a parameter; of those that a mark speaks of, the reason why they fail today."""
    given = []
    for session in SESSIONS:
        reasons = [reason for fails, reason in marks if fails(session)]
        mark = [pytest.mark.xfail(reason="; ".join(reasons), strict=True)] if reasons else []
        given.append(pytest.param(session, id=str(session), marks=mark))
    return pytest.mark.parametrize("session", given)


# ---- what must hold --------------------------------------------------------------------------------------------------


@sessions()
def test_every_operation_would_run(session: Session) -> None:
    """Devices and memory are right through the whole session."""
    assert len(report_of(session).of("step")) == 2 + len(session.stages)


@sessions()
def test_the_host_waits_once_a_step(session: Session) -> None:
    waits = {part.name: list(map(str, part.waits)) for part in report_of(session).of("step")}
    assert {name: found for name, found in waits.items() if len(found) != 1} == {}


@sessions()
def test_records_wait_for_nothing(session: Session) -> None:
    assert [str(wait) for part in report_of(session).of("record") for wait in part.waits] == []


@sessions()
def test_batches_come_through_pinned_memory(session: Session) -> None:
    parts = [*report_of(session).of("step"), *report_of(session).of("evaluate")]
    assert Counter(str(wait) for part in parts for wait in part.pageable) == {}


@sessions()
def test_evaluation_waits_once(session: Session) -> None:
    (part,) = report_of(session).of("evaluate")
    assert len(part.waits) == 1, [str(wait) for wait in part.waits]


@sessions()
def test_a_save_waits_for_nothing(session: Session) -> None:
    """Copies go to pinned memory; the thread that writes waits for them."""
    (part,) = report_of(session).of("save")
    assert [str(wait) for wait in part.waits] == []
    assert [str(wait) for wait in part.pageable] == []


@sessions()
def test_a_change_of_stage_gives_memory_back_to_the_device(session: Session) -> None:
    assert [part.emptied > 0 for part in report_of(session).of("reshape")] == [True] * len(session.stages)


@sessions()
def test_at_most_three_communicators(session: Session) -> None:
    report = report_of(session)
    collectives = [each for part in report.of("initialize") + report.parts[1:] for each in part.collectives]
    by_nccl = Counter(each.group for each in collectives if each.wires == "nccl")
    assert len(by_nccl) <= 3, by_nccl


@pytest.mark.parametrize("world_size", [2, 4])
def test_small_objects_travel_on_the_host(world_size) -> None:
    with fake_cuda(rank=0, world_size=world_size) as gpu:
        from speedlab.comm import Traffic

        group = Group(range(world_size), Traffic(), CUDA)
        with gpu.groups_talk():
            assert group.share({"a": [1, 2]}) == {"a": [1, 2]}
        assert {each.wires for each in gpu.seen.collectives} == {"gloo"}
        assert gpu.seen.waits == []


def test_a_barrier_holds_the_host() -> None:
    """NCCL's collectives only hold back the stream."""
    with fake_cuda(rank=0, world_size=2) as gpu:
        from speedlab.comm import Traffic

        Group(range(2), Traffic(), CUDA).barrier()
        (collective,) = gpu.seen.collectives
        assert collective.wires == "gloo" or gpu.seen.waits
