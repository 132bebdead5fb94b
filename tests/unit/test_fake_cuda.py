"""The engine on a GPU that is made up (see fake_cuda): no tensor of the CPU meets one of the GPU, no memory is read
that was given up, and the host waits for the device once a step.

A session trains two steps, evaluates, goes through all other ZeRO stages with a step in each, makes a record of every
step, and saves in the background. Each is seen from one rank, on which the other ranks' parts are shapes only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_cuda import fake_cuda, groups_talk
from fake_gpu import CUDA, FakeGpu, Seen
from torch import Tensor

import speedlab
from speedlab.comm import CommStats, Group
from speedlab.config import ModelConfig
from speedlab.engine.engine import Engine
from speedlab.layout import Layout
from speedlab.models import GPT
from speedlab.optim import sharded_optimizer
from speedlab.optim.delayed_update import DelayedUpdate

MICRO, LENGTH, HEADS = 2, 10, 2


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
    accumulation: int = 2
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    on_host: tuple[str, ...] = ()
    """What lies in the host's memory, of the fields of `offload`."""
    late: bool = False
    """Updates of the host beside the next step."""
    small: bool = False
    """Moments in 8 bits, and no masters."""

    def __str__(self) -> str:
        shape = f"pp{self.layout.pp}-dp{self.layout.dp}-tp{self.layout.tp}"
        pipeline = f"-{self.schedule}" if self.layout.pp > 1 else ""
        away = "".join(f"-{state} on host" for state in self.on_host)
        away += "-small states" if self.small else ""
        away += "-late" if self.late else ""
        return f"{shape}{pipeline}-rank{self.rank}-zero{self.stage}-{self.dtype}-{self.loss}{away}"

    def model(self) -> GPT:
        layers = 4 if self.schedule in ("interleaved", "zero-bubble") else 2
        shape = {"layers": layers, "hidden": 16, "heads": HEADS, "ffn_hidden": 24, "vocab_size": 29, "context": LENGTH}
        return GPT(ModelConfig(**shape, loss=self.loss, dropout=self.dropout))

    def config(self) -> dict[str, Any]:
        parallel = {"tp": self.layout.tp, "pp": self.layout.pp, "schedule": self.schedule, "sequence": self.sequence}
        return {
            "zero": {"stage": self.stage, "bucket_bytes": 1},
            "precision": {"dtype": self.dtype, **({"moments": "8bit", "masters": "none"} if self.small else {})},
            "parallel": parallel,
            "activation": {"checkpointing": self.checkpointing},
            "batch": {"micro_size": MICRO, "accumulation": self.accumulation},
            "offload": dict.fromkeys(self.on_host, "host") | ({"delayed_update": 1} if self.late else {}),
        }


@dataclass(kw_only=True)
class Report:
    """What was seen in each part of a session, up to the error that ended it, if one did."""

    parts: dict[str, Seen] = field(default_factory=dict)
    error: Exception | None = None

    def of(self, kind: str) -> dict[str, Seen]:
        """Raises the session's error: what it did before is not the whole story."""
        if self.error is not None:
            raise self.error
        return {name: seen for name, seen in self.parts.items() if name.startswith(kind)}


@cache
def report_of(session: Session) -> Report:
    report = Report()
    late = patch.object(sharded_optimizer, "DelayedUpdate", AtOnce)
    with (
        late,
        TemporaryDirectory() as folder,
        fake_cuda(rank=session.rank, world_size=session.layout.world_size) as gpu,
    ):
        try:
            for name in _session(session, gpu, Path(folder)):
                report.parts[name] = gpu.take()
        except Exception as error:
            report.error = error
    return report


class AtOnce(DelayedUpdate):
    """What a thread does, on this one: others are not seen."""

    def start(self) -> None:
        self._run()
        self._started = True


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
    assert engine.timeline is not None


def end_save(engine: Engine, hidden: Path) -> None:
    """Its peers' parts will never come: whoever waits for them hears that there will be none."""
    for other in ("failed", *(f"rank-{rank}" for rank in range(engine.world.size) if rank != engine.world.rank)):
        (hidden / f"{other}.json").write_text('{"error": "the test is over"}')
    assert engine.saving is not None
    engine.saving.join(20.0)
    assert engine.saving.done


# ---- sessions --------------------------------------------------------------------------------------------------------


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
    Session(layout=DP, rank=0, stage=2, stages=(3,), on_host=("optimizer",)),
    Session(layout=DP, rank=1, stage=2, stages=(3,), on_host=("optimizer",), dtype="float32"),
    Session(layout=DP, rank=0, stage=3, stages=(), on_host=("optimizer", "parameters")),
    Session(layout=DP, rank=0, stage=1, stages=(3,), on_host=("optimizer",), late=True),
    Session(layout=DP, rank=1, stage=3, stages=(), on_host=("optimizer", "parameters"), late=True, dtype="float32"),
    Session(layout=DP, rank=0, stage=1, stages=(), checkpointing="block", on_host=("activations",)),
    Session(layout=DP, rank=1, stage=2, stages=(0, 3), small=True),
    Session(layout=DP, rank=0, stage=3, stages=(), small=True, on_host=("optimizer",)),
    *(Session(layout=ALL, rank=rank, stage=1 + rank % 2 * 2, stages=()) for rank in (0, 3, 5, 6)),
]


RARE = {
    *(str(each) for each in SESSIONS if each.layout == ALL and each.rank in (3, 5)),
    *(str(each) for each in SESSIONS if each.layout == PP_DP and each.schedule != "1f1b" and each.rank == 0),
    *(str(each) for each in SESSIONS if each.layout == DP_TP and each.rank == 3),
}
"""For the nightly tier: other ranks of layouts and schedules that are there once more."""


def sessions(reason: str = "", fails: Callable[[Session], bool] = bool) -> Any:
    """Every session as a parameter; those that fail today are marked with the reason."""
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
    given = [
        pytest.param(
            each,
            id=str(each),
            marks=[*(marks if fails(each) else ()), *([pytest.mark.nightly] if str(each) in RARE else ())],
        )
        for each in SESSIONS
    ]
    return pytest.mark.parametrize("session", given)


def today(reason: str) -> Any:
    """For a test that fails today."""
    return pytest.mark.xfail(reason=reason, strict=True)


# ---- what must hold --------------------------------------------------------------------------------------------------


def strings(things: Iterable[object]) -> list[str]:
    return [str(thing) for thing in things]


@sessions()
def test_every_operation_would_run(session: Session) -> None:
    """Devices and memory are right through the whole session."""
    assert len(report_of(session).of("step")) == 2 + len(session.stages)


@sessions()
def test_the_host_waits_once_a_step(session: Session) -> None:
    waits = {name: strings(seen.waits) for name, seen in report_of(session).of("step").items()}
    # Parameters without masters come to the host to be updated there, and gradients that stay to wait there.
    if session.on_host and (session.small or session.late):
        waits = {name: [each for each in found if "pinned_copy.py" not in each] for name, found in waits.items()}
    assert {name: found for name, found in waits.items() if len(found) != 1} == {}


@sessions()
def test_records_wait_for_nothing(session: Session) -> None:
    assert strings(wait for seen in report_of(session).of("record").values() for wait in seen.waits) == []


@sessions()
def test_batches_come_through_pinned_memory(session: Session) -> None:
    parts = [*report_of(session).of("step").values(), *report_of(session).of("evaluate").values()]
    assert Counter(strings(wait for seen in parts for wait in seen.pageable)) == {}


@sessions()
def test_evaluation_waits_once(session: Session) -> None:
    assert len(report_of(session).of("evaluate")["evaluate"].waits) == 1, strings(
        report_of(session).parts["evaluate"].waits
    )


@sessions("the step counter is read", lambda session: session.optimizer is not None)
def test_a_save_waits_for_nothing(session: Session) -> None:
    """Copies go to pinned memory; the thread that writes waits for them."""
    seen = report_of(session).of("save")["save"]
    assert strings([*seen.waits, *seen.pageable]) == []


@sessions()
def test_a_change_of_stage_gives_memory_back_to_the_device(session: Session) -> None:
    assert all(seen.emptied > 0 for seen in report_of(session).of("reshape").values())


@sessions()
def test_at_most_three_communicators(session: Session) -> None:
    """NCCL makes one for each group that something of the GPU travels through."""
    every = [collective for seen in report_of(session).of("").values() for collective in seen.collectives]
    groups = {each.group: f"first {each}" for each in reversed(every) if each.wires == "nccl"}
    assert len(groups) <= 3, list(groups.values())


@sessions()
def test_gathers_start_as_each_piece_is_updated(session: Session) -> None:
    """The first gather after the update is started before the last piece is updated."""
    for name, seen in report_of(session).of("step").items():
        stage = int(name.split()[-1]) if " at " in name else session.stage
        if stage in (1, 2) and session.optimizer is None and not session.on_host:
            updates = [place for place, operation in enumerate(seen.order) if operation == "adamw"]
            assert "_allgather_base_" in seen.order[updates[0] : updates[-1]], name


@sessions()
def test_no_mask_over_all_heads(session: Session) -> None:
    """What attention holds for each pair of tokens, it holds for the heads of this rank."""
    most = MICRO * HEADS // session.layout.tp * LENGTH**2
    pairs = {
        shape
        for seen in report_of(session).of("step").values()
        for shape in seen.shapes
        if shape[-2:] == (LENGTH, LENGTH)
    }
    assert {shape for shape in pairs if math.prod(shape) > most} == set()


def test_low_precision_is_summed_in_float32() -> None:
    """Over more than two ranks, and without more bytes: NCCL would round after each of them."""
    session = Session(layout=Layout(dp=4), rank=1, stage=2, stages=(), accumulation=1)
    for seen in report_of(session).of("step").values():
        sums = [each for each in seen.collectives if each.wires == "nccl" and "reduce" in each.name]
        assert strings(each for each in sums if each.dtype is torch.bfloat16 and each.ranks > 2) == []
        assert strings(each for each in sums if each.dtype is torch.float32 and each.nbytes > 1024) == []


def test_the_optimizers_time_is_not_lost() -> None:
    """Its events pass after the record of its step was taken; they are in a later one, and waits are counted with the
    phase that they were in."""
    with fake_cuda(rank=0, world_size=2) as gpu:
        engine = make_engine(Session(layout=DP, rank=0, stage=1), gpu)
        spent: Counter[str] = Counter()
        for _ in range(3):
            engine.train_batch(micro_batches(engine))
            spent.update(engine.clock.take().phases)
        gpu.wait("the end")
        spent.update(engine.clock.take().phases)
        # What is measured in operations, each of them once: the phases, and what was waited for in them.
        assert spent["optimizer"] > 0
        every = sum(spent.values())
        again = make_engine(Session(layout=DP, rank=0, stage=1), gpu)
        for _ in range(3):
            again.train_batch(micro_batches(again))
        gpu.wait("the end")
        assert every == pytest.approx(sum(again.clock.take().phases.values()))


@pytest.mark.parametrize("stage", [0, 1])
def test_a_loaded_state_is_where_the_optimizer_wants_it(stage, tmp_path) -> None:
    """torch's fused AdamW reads `step` on the GPU."""
    session = Session(layout=Layout(), rank=0, stage=stage, optimizer=fused_adamw)
    with fake_cuda(rank=0, world_size=1) as gpu:
        engine = make_engine(session, gpu)
        engine.train_batch(micro_batches(engine))
        engine.save_checkpoint(tmp_path, "tag")
        engine.load_checkpoint(tmp_path, "tag")
        steps = [state["step"] for state in engine.optimizer.state.values()]
        assert {step.device for step in steps} == {CUDA}
        engine.train_batch(micro_batches(engine))


# ---- what ranks tell each other --------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 4])
def test_small_objects_travel_on_the_host(world_size) -> None:
    with fake_cuda(rank=0, world_size=world_size) as gpu:
        group = Group(range(world_size), CommStats(), CUDA)
        with groups_talk():
            assert group.share({"a": [1, 2]}) == {"a": [1, 2]}
        seen = gpu.take()
        assert {each.wires for each in seen.collectives} == {"gloo"}
        assert seen.waits == []


def test_a_barrier_holds_the_host() -> None:
    """NCCL's collectives only hold back the stream."""
    with fake_cuda(rank=0, world_size=2) as gpu:
        Group(range(2), CommStats(), CUDA).barrier()
        seen = gpu.take()
        assert {each.wires for each in seen.collectives} == {"gloo"} or seen.waits
