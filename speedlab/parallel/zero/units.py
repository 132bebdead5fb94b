"""Choosing units: which parameters are gathered and released together. One repeated block is one unit; the rest is the
root unit.

A unit, and the passes in which units come and go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from speedlab.comm import PeerLost
from speedlab.config.errors import briefly
from speedlab.offload import OffloadError
from speedlab.parallel.zero.comm_groups import ReadThenGathered, Work
from speedlab.parallel.zero.flat_param import FlatParam
from speedlab.parallel.zero.parameter import stays_whole

UnitChoice = Sequence[type[nn.Module] | str] | Callable[[str, nn.Module], bool]
"""How a user names units: module classes, module names, or a predicate over (name, module)."""

ROOT = "root"

_THEIR_BLOCK = "GradientCheckpointingLayer"
"""The base class of transformers' blocks."""


@dataclass
class UnitPlan:
    """A unit before it has flats: the modules it wraps and the parameters it holds, by full name."""

    name: str
    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def plan_units(model: nn.Module, choice: UnitChoice | None = None, *, bucket_bytes: int = 0) -> list[UnitPlan]:
    """Cut `model` into units: the root unit first, then blocks in the order in which the model registers them.

    1. Blocks are what `choice` says, or the children of every list of two or more modules of one class (outermost
    first), or of one module that has no such list inside; of several classes if one comes twice, or if they have a base
    class of their own. Nobody calls a list: in a list of lists the blocks are those
    that the inner ones repeat, or, where they repeat nothing, the modules of each inner one together.
    2. Neighbours of one list are merged while their parameters stay within `bucket_bytes`.
    3. A parameter that several blocks share, or that stands outside all blocks, belongs to the root unit.
    4. Frozen parameters that no flat can hold belong to none.

    Raises ValueError when `choice` matches no module.
    """
    names = {id(module): name for name, module in model.named_modules()}
    lists = _chosen_blocks(model, choice) if choice is not None else _repeated_blocks(model)
    merged = [group for blocks in lists for group in _merge_neighbours(blocks, bucket_bytes)]
    plans = [UnitPlan(_joint_name([names[id(m)] for m in group]), _called(group)) for group in merged]

    holder: dict[int, UnitPlan | None] = {}
    for plan in plans:
        for module in plan.modules:
            for parameter in module.parameters():
                known = holder.setdefault(id(parameter), plan)
                if known is not plan:
                    holder[id(parameter)] = None
    outside = {
        id(p)
        for m in _outside(model, {id(m) for plan in plans for m in plan.modules})
        for p in m.parameters(recurse=False)
    }

    root = UnitPlan(ROOT, [model])
    for name, parameter in model.named_parameters():
        if stays_whole(parameter):
            continue
        owner = None if id(parameter) in outside else holder.get(id(parameter))
        (owner or root).parameters[name] = parameter
    for plan in plans:  # Calls of a module that others share tell nothing of this unit.
        own = {id(parameter) for parameter in plan.parameters.values()}
        plan.modules = [module for module in plan.modules if any(id(p) in own for p in module.parameters())]
    return [root, *(plan for plan in plans if plan.parameters)]


def _repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Every outermost list of blocks, each as a list of its children that hold parameters."""
    found: list[list[nn.Module]] = []

    def visit(module: nn.Module) -> None:
        blocks = [block for block in _blocks_of(module) if not _is_list_of_blocks(block)]
        if blocks:
            found.append(blocks)
        for child in module.children():
            if child not in blocks:
                visit(child)

    visit(model)
    return found


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks that a list repeats, of one class or of several; empty if it is no list of blocks."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    holding = [child for child in module.children() if _has_parameters(child) and takes_hooks(child)]
    # A list of bare layers (Sequential(Linear, ReLU, Linear)) is no list of blocks.
    composite = [child for child in holding if any(True for _ in child.children())]
    counts = Counter(type(child) for child in composite)
    if len(counts) > 1:
        return _blocks_of_classes(composite, counts)
    return composite if counts and (len(composite) >= 2 or _is_one_block(module, composite)) else []


def _blocks_of_classes(composite: list[nn.Module], counts: Counter[type[nn.Module]]) -> list[nn.Module]:
    """The blocks of a list of several classes, as of models that mix attention with other layers.

    Two layers of one block (attention and feed-forward) are in such lists, too. So a class has to come twice, or the
    classes have to share a base class of their own. A child that holds blocks itself (a tower, a stage of a U-Net) is
    left to its own lists, unless its class comes twice next to plain blocks (experts) or transformers calls it a block.
    """
    bases = set.intersection(*(set(kind.__mro__) - set(nn.ModuleList.__mro__) for kind in counts))
    own = {
        base for base in bases if base.__module__ not in ("typing", "abc", "builtins") and issubclass(base, nn.Module)
    }
    if max(counts.values()) < 2 and not own:
        return []
    if any(base.__name__ == _THEIR_BLOCK for base in own):
        return composite
    plain = [child for child in composite if not _repeated_blocks(child)]
    blocks = [child for child in composite if child in plain or (plain and counts[type(child)] >= 2)]
    return blocks if len(blocks) >= 2 else []


def _is_list_of_blocks(module: nn.Module) -> bool:
    """Whether the module only holds blocks, each of which is called alone."""
    blocks = _blocks_of(module) if _is_bare(module) else []
    return bool(blocks) and all(child in blocks for child in module.children() if _has_parameters(child))


def _is_bare(module: nn.Module) -> bool:
    """Whether the module only holds others, as a list does, and has no forward to be called by."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def takes_hooks(module: nn.Module) -> bool:
    """Whether a hook can tell that the module is called."""
    return not isinstance(module, torch.jit.ScriptModule)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _called(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are called where these are used: themselves, or what the bare ones among them hold."""
    return [
        called
        for module in modules
        for called in (_called(module.children()) if _is_bare(module) else [module])
        if _has_parameters(called)
    ]


def _is_one_block(module: nn.Module, composite: list[nn.Module]) -> bool:
    """Whether a list of one module is one of blocks, of which a pipeline stage has left only this one."""
    return isinstance(module, nn.ModuleList) and not _repeated_blocks(composite[0])


def _chosen_blocks(model: nn.Module, choice: UnitChoice) -> list[list[nn.Module]]:
    def matches(name: str, module: nn.Module) -> bool:
        if callable(choice):
            return choice(name, module)
        return any(name == entry if isinstance(entry, str) else isinstance(module, entry) for entry in choice)

    found: list[nn.Module] = []

    def visit(name: str, module: nn.Module) -> None:
        if module is not model and matches(name, module):
            found.append(module)
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"units: {briefly(choice)} matches no module of {type(model).__name__}; its module classes are "
            f"{', '.join(kinds)}"
        )
    return [found]


def _merge_neighbours(blocks: list[nn.Module], bucket_bytes: int) -> list[list[nn.Module]]:
    merged: list[list[nn.Module]] = []
    held = 0
    for block in blocks:
        size = sum(p.numel() * p.element_size() for p in block.parameters())
        if merged and held + size <= bucket_bytes:
            merged[-1].append(block)
            held += size
        else:
            merged.append([block])
            held = size
    return merged


def _outside(model: nn.Module, block_ids: set[int]) -> list[nn.Module]:
    """Modules that are in no block."""
    found, stack = [], [model]
    while stack:
        module = stack.pop()
        if id(module) in block_ids:
            continue
        found.append(module)
        stack.extend(module.children())
    return found


def _joint_name(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}–{names[-1].rpartition('.')[2]}"


class UnitPhase(Enum):
    """What the module is doing; decides in which order units are gathered and whether they are released after a
    forward."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ValueObserver(Protocol):
    """Who looks at the values of units while these are here."""

    def came(self, unit: Unit) -> None: ...

    def goes(self, unit: Unit) -> None: ...


class Unit:
    """Parameters that are gathered and released together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[FlatParam]) -> None:
        self.name, self.modules, self.flats = name, modules, flats
        self.trainable_count = sum(len(flat.parameters) for flat in flats if flat.trainable)
        self.gathers: list[Work] | None = None
        """The gather under way; None when the unit is released, [] when its parameters are there."""
        self.cut_off = False
        """Whether a wait for the gather under way has failed: its transfers are not waited for again, and the memory
        that they fill stays until `forget_gather`."""
        self.missing = self.trainable_count
        """Gradients that this backward pass has not produced yet."""
        self.gradients = [flat.gradient for flat in flats if flat.gradient is not None]
        self.calls = 0
        """How many forwards of its modules are running, one inside the other; while there is one, its parts need no
        care of their own."""
        self.open_calls: list[RemovableHandle] = []
        """Hooks on calls whose input gradients are still to come; kept where frozen parameters are needed to the
        end."""
        self.has_frozen = any(not flat.trainable for flat in flats)
        self.watch: ValueObserver | None = None

    def start_gather(self) -> None:
        if self.gathers is not None:
            return
        begun: list[Work] = []
        try:
            for flat in self.flats:
                begun.append(flat.gather())
        except BaseException:  # All are gathered, or none is.
            for flat, pending in zip(self.flats, begun, strict=False):
                with suppress(Exception):  # What was raised first is what counts.
                    pending.wait()
                flat.release()
            raise
        self.gathers = begun

    def finish_gather(self) -> None:
        """Raises OffloadError where this rank's part cannot be read; nothing of the unit is under way then. Raises
        PeerLost where an earlier wait has failed: its error was raised then, and may be of another world."""
        if self.cut_off:
            raise PeerLost(f"the gather of {self.name} was cut off; the ranks have to meet again (engine.reconnect)")
        arriving = self.gathers or ()
        try:
            for pending in arriving:
                pending.wait()
        except OffloadError:
            self.forget_gather()
            raise
        except BaseException:
            self.cut_off = True
            raise
        self.gathers = []
        if arriving and self.watch is not None:
            self.watch.came(self)

    def release(self) -> None:
        self.calls = 0
        if self.gathers is not None:
            self.finish_gather()
            if self.watch is not None:
                self.watch.goes(self)
            for flat in self.flats:
                flat.release()
            self.gathers = None

    def forget_gather(self) -> None:
        """Nothing comes from peers any more. What this rank reads itself does, and has to be over before its memory
        serves others."""
        for pending in self.gathers or ():
            if isinstance(pending, ReadThenGathered):
                with suppress(OffloadError):  # Whoever needs the values is told.
                    pending.reading.wait()
            del pending  # A transfer that is gone writes nothing into the memory that is freed now.
        if self.gathers is not None:
            self.gathers, self.cut_off = [], False
            self.release()

    def forget_calls(self) -> None:
        """No gradients will come for the calls that are open. (A hook on several tensors holds their graph, which holds
        the hook, where no garbage collector sees it.)"""
        for handle in self.open_calls:
            handle.remove()
        self.open_calls.clear()

    def __repr__(self) -> str:
        return f"Unit({self.name}, {sum(flat.numel for flat in self.flats):,} parameters)"
