"""Sequences of calls to an engine as data, carried out on ranks beside a plain loop in one process.

1. A `Sequence` is a list of `Call`s with what the engine is made from; it prints as the Python that makes it again.
2. `carry_out` makes each call twice on every rank: on the engine, whose rank sees its own micro-batches (`Ours`), and
   on a whole model with torch's own optimizer, which sees those of all ranks (`Plain`).
3. After each call everything that can be seen is compared: what the call gave (losses, values, a refusal), the number
   of the step, whether the micro-batch is the last one of its step, parameters and buffers, the gradient's norm, the
   optimizer's moments.

The rules, which `Plain` states: a call that only looks changes nothing, wherever it comes. A step's gradient is the
mean over the micro-batches of all ranks; a parameter that none of them used is left alone, as torch does. An exception
in a forward changes nothing, one in a backward abandons the whole step. What belongs between two steps is refused
inside one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import speedlab
from ranks import pool
from ranks.probe import OPTIMIZERS, SideProbe, batch, probe, straight, whole_loss
from speedlab.comm import PeerLost

ALLOWED = 2e-5
"""How far a value may be from the plain loop's. A missing or doubled term of a gradient moves it by 1e-3."""

REFUSED = "refused"

ELSEWHERE = "the cause is on another rank"


@dataclass(frozen=True)
class Call:
    """One call. `data`: number of a micro-batch, a stage or an earlier save; `how`: see the methods of `Plain`."""

    name: str
    data: int = 0
    how: Any = None

    def __repr__(self) -> str:
        shown = [repr(self.name), str(self.data), *([repr(self.how)] if self.how is not None else [])]
        return f"Call({', '.join(shown)})"


# ---- what is carried out ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """What `carry_out` does. `instance`: the optimizer is given as an object of the caller's, not as a callable.

    `tensor`: all ranks are tensor-parallel peers, and see the same data. `other`: there is a second engine over another
    module, whose steps are the calls "step_other".
    """

    calls: list[Call]
    stage: int = 0
    accumulation: int = 1
    optimizer: str = "sgd"
    instance: bool = False
    clip_norm: float | None = None
    optimizer_at: str = "none"
    """Where the optimizer's states lie at first."""
    tensor: bool = False
    other: bool = False
    build: Callable[[], nn.Module] = field(default=probe)

    def __repr__(self) -> str:
        calls = ", ".join(repr(call) for call in self.calls if call.name != "nothing")
        fields = f"stage={self.stage}, accumulation={self.accumulation}, optimizer={self.optimizer!r}"
        more = (
            f"instance={self.instance}, clip_norm={self.clip_norm}, optimizer_at={self.optimizer_at!r}, "
            f"tensor={self.tensor}, other={self.other}, build={self.build.__name__}"
        )
        return f"Sequence({fields}, {more}, calls=[{calls}])"

    def engine(self, model: nn.Module) -> Any:
        config = {
            "zero": {"stage": self.stage, "bucket_bytes": 1},  # Each block is a unit of its own.
            "precision": {"dtype": "float32"},
            "batch": {"micro_size": 2, "accumulation": self.accumulation},
            "clip_norm": self.clip_norm,
            "offload": {"optimizer": self.optimizer_at},
            "parallel": {"tp": dist.get_world_size() if self.tensor else 1},
        }
        make: Any = OPTIMIZERS[self.optimizer]
        if self.instance:
            make = make([p for p in model.parameters() if p.requires_grad])
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} if self.tensor else None
        loss = whole_loss if isinstance(model, SideProbe) else None
        return speedlab.initialize(model=model, optimizer=make, config=config, tp_plan=plan, loss=loss)[0]

    @property
    def data_place(self) -> tuple[int, int]:
        """How many ranks see different data, and which of them this one is."""
        return (1, 0) if self.tensor else (dist.get_world_size(), dist.get_rank())


OTHER = Sequence(calls=[], stage=3, optimizer="adamw", build=straight)
"""What the second engine is made from."""

# ---- the plain loop --------------------------------------------------------------------------------------------------


class Plain:
    """The oracle: one whole model, torch's own optimizer, the micro-batches of all ranks. `rank`: whose losses to give.

    Every method is a call and returns what the engine's caller must see.
    """

    def __init__(self, sequence: Sequence, size: int, rank: int) -> None:
        self.sequence, self.size, self.rank = sequence, size, rank
        self.model: Any = sequence.build()
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[sequence.optimizer](self.trainable)
        self.global_step = 0
        self.norm: float | None = None
        self.saves: list[Any] = []
        self.micro = 0
        self.pending: list[Tensor] | None = None
        """Losses of a forward that no backward has followed yet."""
        self.fed = self.began = self.unsummed = False
        """Whether a backward came in this micro-batch, in this step; whether the last one was inside no_sync."""
        self.other = Plain(OTHER, size, rank) if sequence.other else None
        self.forwards, self.fresh, self.by_itself = 0, False, False
        """Forwards in this micro-batch; whether one came behind its last backward; whether a backward has ended a
        micro-batch of this step, as it does behind one inside no_sync."""

    @property
    def is_boundary(self) -> bool:
        return self.micro + 1 >= self.sequence.accumulation

    @property
    def in_step(self) -> bool:
        return self.micro > 0 or self.began

    def allows(self, call: Call) -> bool:
        """Whether the call has a meaning now; the others are left out."""
        if call.name == "train_batch" or (call.name == "fail" and call.how[2]):
            return not self.in_step
        if call.name == "step_other":
            return self.other is not None
        if call.name == "fail" and self.fed and self.sequence.accumulation > 1:
            return False  # Its backward would be refused before it could fail.
        return call.name != "load" or bool(self.saves)

    def losses(self, number: int) -> list[Tensor]:
        if torch.is_grad_enabled():
            self.begin_forward()
        return [whole_loss(self.model, batch(number, rank)) for rank in range(self.size)]

    def step_other(self, call: Call) -> bool | str:
        """A step of the second engine, which leaves the first one as it is."""
        assert self.other is not None  # Else the call is left out.
        return self.other.micro_batch(Call("micro_batch", call.data))

    def begin_forward(self) -> None:
        self.forwards, self.fresh = self.forwards + 1, True

    def nothing(self, call: Call) -> None:
        pass

    def forward(self, call: Call) -> float:
        self.pending = self.losses(call.data)
        return self.pending[self.rank].item()

    def backward(self, call: Call) -> str | None:
        """Of the forward before, or of a new one. `how`: "no_sync" or None. Refused where it belongs to another
        micro-batch than `step` counts."""
        losses, several = self.pending or self.losses(call.data), self.sequence.accumulation > 1
        if several and self.fed and (self.fresh or self.forwards > 1):
            if not self.unsummed:
                self.forget_step()
                return REFUSED
            self.micro, self.forwards, self.by_itself = self.micro + 1, 0, True
        if several and self.micro >= self.sequence.accumulation:
            self.forget_step()
            return REFUSED
        self.fresh = False
        for loss in losses:
            (loss / (self.sequence.accumulation * self.size)).backward()
        self.pending, self.fed, self.began, self.unsummed = None, True, True, call.how == "no_sync"
        return None

    def step(self, call: Call) -> bool | str:
        """A backward comes first where none has come yet."""
        if not self.fed:
            self.backward(Call("backward", call.data))
        if self.by_itself and not self.is_boundary:
            self.forget_step()
            return REFUSED
        if not self.is_boundary:
            self.micro, self.fed, self.forwards = self.micro + 1, False, 0
            return False
        if self.unsummed:
            return REFUSED
        gradients = [p.grad for p in self.trainable if p.grad is not None]
        self.norm = float(sum(g.double().square().sum() for g in gradients) ** 0.5)
        if self.sequence.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trainable, self.sequence.clip_norm)
        self.optimizer.step()
        self.forget_step()
        self.global_step += 1
        return True

    def micro_batch(self, call: Call) -> bool | str:
        """Forward, backward, step. `how`: "no_sync" or None, for the backward."""
        self.pending = None
        return self.backward(call) or self.step(call)

    def train_batch(self, call: Call) -> float | str:
        """A whole step. `how`: how many micro-batches are given too many (or too few)."""
        self.pending = None
        if call.how:
            return REFUSED
        total = 0.0
        for index in range(self.sequence.accumulation):
            losses = self.losses(call.data + 16 * index)
            for loss in losses:
                (loss / (self.sequence.accumulation * self.size)).backward()
            total += sum(loss.item() for loss in losses) / (self.sequence.accumulation * self.size)
            self.fed, self.unsummed = True, False
            self.step(call)
        return total

    def look(self, call: Call) -> float:
        """A forward whose result is only looked at. `how`: "no_grad", "inference_mode", or "gradients", dropped."""
        if call.how == "gradients":
            self.begin_forward()
        with torch.no_grad():
            return self.losses(call.data)[self.rank].item()

    def evaluate(self, call: Call) -> float:
        """The mean loss of two micro-batches of each rank."""
        with torch.no_grad():
            losses = self.losses(call.data) + self.losses(call.data + 16)
        return sum(loss.item() for loss in losses) / len(losses)

    def gather(self, call: Call) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def fail(self, call: Call) -> str:
        """A micro-batch that raises. `how`: (where, on which rank or None for all, whether inside train_batch)."""
        self.pending = None
        self.begin_forward()
        if loses_the_step(call):
            self.forget_step()
        here = call.how[1] is None or call.how[1] % self.size == self.rank
        return "ZeroDivisionError" if here else ELSEWHERE

    def reshape(self, call: Call) -> str | None:
        """To stage `data`, with states at the places `how`. A forward of before cannot be differentiated any more: what
        it saved has moved."""
        if self.in_step:
            return REFUSED
        self.pending = None
        return None

    def save(self, call: Call) -> str | None:
        if self.in_step:
            return REFUSED
        self.saves.append(copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.global_step)))
        return None

    def load(self, call: Call) -> None:
        """An earlier save of this sequence. A step that is under way is forgotten."""
        model, optimizer, self.global_step = copy.deepcopy(self.saves[call.data % len(self.saves)])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.forget_step()

    def forget_step(self) -> None:
        self.optimizer.zero_grad()
        self.micro, self.pending = 0, None
        self.fed = self.began = self.unsummed = False
        self.forwards, self.fresh, self.by_itself = 0, False, False

    def moments(self) -> dict[str, float]:
        """Sum of squares of each kind of moments over all parameters."""
        return squares(self.optimizer)


def squares(optimizer: Optimizer) -> dict[str, float]:
    found: dict[str, float] = {}
    for state in optimizer.state.values():
        for kind, value in state.items():
            if isinstance(value, Tensor) and kind != "step":
                found[kind] = found.get(kind, 0.0) + float(value.double().square().sum())
    return {kind: value for kind, value in found.items() if value > 0}


# ---- the engine ------------------------------------------------------------------------------------------------------


class Ours:
    """The same calls on the engine of this rank."""

    def __init__(self, sequence: Sequence, folder: Path) -> None:
        self.sequence, self.folder = sequence, folder
        self.model: Any = sequence.build()
        self.engine = sequence.engine(self.model)
        self.size, self.rank = sequence.data_place
        self.pending: Tensor | None = None
        self.fed = False
        self.tags: list[str] = []
        self.worlds = 0
        self.other = Ours(OTHER, folder) if sequence.other else None

    def destroy(self) -> None:
        for each in (self, self.other):
            if each is not None:
                each.engine.destroy(keep_parameters=False)

    def loss(self, number: int) -> Tensor:
        loss = self.engine(*batch(number, self.rank)).loss
        return loss + self.model.side_loss() if isinstance(self.model, SideProbe) else loss

    def step_other(self, call: Call) -> bool | str:
        assert self.other is not None  # Else the call is left out.
        return self.other.micro_batch(Call("micro_batch", call.data))

    def batches(self, number: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch(number + 16 * index, self.rank) for index in range(count))

    def nothing(self, call: Call) -> None:
        pass

    def forward(self, call: Call) -> float:
        self.pending = self.loss(call.data)
        return self.pending.item()

    def backward(self, call: Call) -> str | None:
        loss = self.loss(call.data) if self.pending is None else self.pending
        with self.engine.no_sync() if call.how == "no_sync" else contextlib.nullcontext():
            refused = unless_refused(lambda: self.engine.backward(loss), "batch.accumulation") == REFUSED
        self.pending, self.fed = None, not refused
        return REFUSED if refused else None

    def step(self, call: Call) -> bool | str:
        if not self.fed:
            self.backward(Call("backward", call.data))
        under_way = self.engine._step.under_way
        updated = unless_refused(self.engine.step, "")
        if updated == REFUSED and under_way and not self.engine._step.under_way:
            self.pending, self.fed = None, False  # The step is given up: it had too few micro-batches.
            return updated
        if updated is True:
            self.pending = None  # A forward of before the update cannot be differentiated any more.
        self.fed = updated == REFUSED
        return updated

    def micro_batch(self, call: Call) -> bool | str:
        self.pending = None
        return self.backward(call) or self.step(call)

    def train_batch(self, call: Call) -> float | str:
        self.pending = None
        batches = self.batches(call.data, self.sequence.accumulation + (call.how or 0))
        return unless_refused(lambda: self.engine.train_batch(batches), "micro-batches")

    def look(self, call: Call) -> float:
        with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(call.how, torch.enable_grad)():
            return self.loss(call.data).item()

    def evaluate(self, call: Call) -> float:
        return self.engine.evaluate(self.batches(call.data, 2))

    def gather(self, call: Call) -> dict[str, Tensor]:
        return {name: speedlab.gather(p) for name, p in self.model.named_parameters()}

    def fail(self, call: Call) -> str:
        where, who, inside = call.how
        self.pending = None
        if loses_the_step(call):
            self.fed = False
        here = who is None or who % self.size == self.rank
        after = self.sequence.accumulation - 1 if inside else 0
        seen = ELSEWHERE
        try:
            with self.model.failing(where, after) if here else contextlib.nullcontext():
                if inside:
                    self.engine.train_batch(self.batches(call.data, self.sequence.accumulation))
                else:
                    self.engine.backward(self.loss(call.data))
        except ZeroDivisionError:
            seen = "ZeroDivisionError"
        except PeerLost:
            pass  # The cause is on the other rank.
        if who is not None:
            self.meet_again()
        return seen

    def meet_again(self) -> None:
        """As a run does when one rank has failed: all leave, those that wait for it at once, and join again."""
        engines = [each.engine for each in (self, self.other) if each is not None]
        for engine in engines:
            engine.disconnect()
        pool._join(self.folder / f"world-{self.worlds}")
        self.worlds += 1
        for engine in engines:
            engine.reconnect()

    def reshape(self, call: Call) -> str | None:
        optimizer, parameters = call.how or ("none", "none")
        # Ranks that skip blocks take shards that were offered; parameters go nowhere without the optimizer's states.
        if call.data < 3 or self.size > 1 or optimizer == "none":
            parameters = "none"
        places = {"optimizer": optimizer, "parameters": parameters}
        refused = unless_refused(lambda: self.engine.reshape(zero=call.data, offload=places), "micro-batch")
        if refused != REFUSED:
            self.pending = None
        return refused

    def save(self, call: Call) -> str | None:
        tag = f"save-{len(self.tags)}"
        if (
            unless_refused(lambda: self.engine.save_checkpoint(self.folder, tag, verify=False), "micro-batch")
            == REFUSED
        ):
            return REFUSED
        self.tags.append(tag)
        return None

    def load(self, call: Call) -> None:
        self.engine.load_checkpoint(self.folder, self.tags[call.data % len(self.tags)], verify=False)
        self.pending, self.fed = None, False

    def moments(self) -> dict[str, float]:
        own: dict[str, float] = {}
        optimizer = self.engine.partitioned_optimizer
        for flat in optimizer.flats:
            with optimizer.visit(flat):
                for kind, state in optimizer.states_of(flat).items():
                    own[kind] = own.get(kind, 0.0) + float(state.double().square().sum())
        own = {kind: value for kind, value in own.items() if value > 0}
        total = torch.tensor([own[kind] for kind in sorted(own)], dtype=torch.float64)
        dist.all_reduce(total)
        share = self.size if self.engine.zero_stage == 0 else 1  # Replicated ones were counted on every rank.
        return dict(zip(sorted(own), (total / share).tolist(), strict=True))


def loses_the_step(call: Call) -> bool:
    """An exception in a forward changes nothing; one in a backward, which may have added to gradients, and one of a
    single rank, after which all meet again, give up the step."""
    where, who, inside = call.how
    return where == "backward" or who is not None or inside


def unless_refused(act: Callable[[], Any], word: str) -> Any:
    """What `act` gives; REFUSED when it raises an error that says `word`, as errors about the moment do."""
    try:
        return act()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PeerLost) or word not in str(error):
            raise
        return REFUSED


# ---- one beside the other --------------------------------------------------------------------------------------------


def carry_out(sequence: Sequence, folder: Path) -> list[str]:
    """Make every call of `sequence` on this rank; returns the first difference from the plain loop, or [].

    Later calls are made nevertheless: the other ranks wait for them. `folder`: an empty one, the same on all ranks.
    """
    ours, plain = Ours(sequence, folder), Plain(sequence, *sequence.data_place)
    found: list[str] = []
    try:
        for index, call in enumerate(sequence.calls):
            if not plain.allows(call):
                continue
            before = plain.global_step
            expected, seen = getattr(plain, call.name)(call), getattr(ours, call.name)(call)
            wrong = [*differences("it gave", seen, expected), *compare(ours, plain, updated=plain.global_step > before)]
            if wrong and not found:
                found = [f"rank {dist.get_rank()}, after call {index}, {call!r}:", *wrong[:6]]
    except Exception as error:
        error.add_note(f"rank {dist.get_rank()} in call {index}, {call!r}; before that: {found or 'no difference'}")
        raise
    finally:
        ours.destroy()
    return found


def compare(ours: Ours, plain: Plain, *, updated: bool) -> list[str]:
    """Everything of a state that a caller can see without changing it."""
    engine = ours.engine
    pairs = [
        ("global_step", engine.global_step, plain.global_step),
        ("is_gradient_accumulation_boundary()", engine.is_gradient_accumulation_boundary(), plain.is_boundary),
        ("state_dict()", engine.state_dict(), plain.model.state_dict()),
    ]
    if updated:
        pairs.append(("global_grad_norm", engine.global_grad_norm, plain.norm))
    if updated and not ours.sequence.tensor:  # Parts and copies would have to be told apart.
        pairs.append(("squares of moments:", ours.moments(), plain.moments()))
    found = [line for pair in pairs for line in differences(*pair)]
    if ours.other is not None and plain.other is not None:
        found += [f"of the other engine, {line}" for line in compare(ours.other, plain.other, updated=False)]
    return found


def differences(what: str, ours: Any, theirs: Any) -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{what}: has {sorted(ours)} instead of {sorted(theirs)}"]
        return [line for key in theirs for line in differences(f"{what} {key}", ours[key], theirs[key])]
    if isinstance(theirs, Tensor):
        if ours.shape != theirs.shape:
            return [f"{what}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"]
        separate = float((ours.double() - theirs.double()).abs().max())
        return [] if separate <= ALLOWED else [f"{what}: {separate:.3g} apart (allowed {ALLOWED:g})"]
    if type(theirs) is float and type(ours) is float:
        return (
            []
            if abs(ours - theirs) <= ALLOWED * max(1.0, abs(theirs))
            else [f"{what}: {ours:.9g} instead of {theirs:.9g}"]
        )
    return [] if ours == theirs else [f"{what}: {ours!r} instead of {theirs!r}"]
