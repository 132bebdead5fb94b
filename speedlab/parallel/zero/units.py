"""Units: sets of parameters that are gathered and released together.

`plan_units` chooses the units of a model: each repeated block is one unit, and the rest is the root unit. `Unit` holds
the flats of one unit, and its gather.
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
from speedlab.parallel.zero.comm_groups import PendingWork, ReadThenGathered
from speedlab.parallel.zero.flat_param import FlatParam
from speedlab.parallel.zero.parameter import stays_whole

UnitChoice = Sequence[type[nn.Module] | str] | Callable[[str, nn.Module], bool]
"""How a user names units: module classes, module names, or a predicate over (name, module)."""

ROOT = "root"

_THEIR_BLOCK = "GradientCheckpointingLayer"
"""Base class of the blocks in transformers."""


@dataclass
class UnitPlan:
    """A unit before it has flats: its modules, and its parameters by full name."""

    name: str
    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def plan_units(model: nn.Module, choice: UnitChoice | None = None, *, bucket_bytes: int = 0) -> list[UnitPlan]:
    """Cut a model into units: the root first, then blocks in the order in which the model registers them.

    1. Find the blocks: what `choice` says, or the children of each outermost list of blocks. Such a list has one of
       these forms:
       - two or more modules of one class;
       - one module that has no such list inside;
       - modules of several classes, if one class appears twice or if all share their own base class.
       A list itself is never called. So in a list of lists, the blocks are those of the inner lists. If the inner
       lists repeat nothing, the modules of each inner list form one unit.
    2. Merge neighbours of one list while their parameters fit into `bucket_bytes`.
    3. Put parameters that several blocks share, or that are outside all blocks, into the root unit.
    4. Leave out frozen parameters that no flat can hold.

    Args:
        model: The model to cut.
        choice: The user's choice of blocks; None: find them.
        bucket_bytes: Largest size of a merged unit, in bytes; 0: do not merge.

    Raises:
        ValueError: `choice` matches no module.
    """
    names = {id(module): name for name, module in model.named_modules()}
    # Step 1.
    lists = _chosen_blocks(model, choice) if choice is not None else _repeated_blocks(model)
    # Step 2.
    merged = [group for blocks in lists for group in _merge_neighbours(blocks, bucket_bytes)]
    plans = [UnitPlan(_joint_name([names[id(m)] for m in group]), _called(group)) for group in merged]

    holder: dict[int, UnitPlan | None] = {}
    for plan in plans:
        for module in plan.modules:
            for parameter in module.parameters():
                # Step 3. None marks a parameter that several units share.
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
        # Step 4.
        if stays_whole(parameter):
            continue
        owner = None if id(parameter) in outside else holder.get(id(parameter))
        (owner or root).parameters[name] = parameter
    for plan in plans:  # A call of a module whose parameters are all in the root says nothing about this unit.
        own = {id(parameter) for parameter in plan.parameters.values()}
        plan.modules = [module for module in plan.modules if any(id(p) in own for p in module.parameters())]
    return [root, *(plan for plan in plans if plan.parameters)]


def _repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks of every outermost list of blocks. Only children with parameters count."""
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
    """Return the blocks in a list of modules; [] if the list is not a list of blocks."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    holding = [child for child in module.children() if _has_parameters(child) and takes_hooks(child)]
    # Sequential(Linear, ReLU, Linear) is a list of layers, not of blocks.
    composite = [child for child in holding if any(True for _ in child.children())]
    counts = Counter(type(child) for child in composite)
    if len(counts) > 1:
        return _blocks_of_classes(composite, counts)
    return composite if counts and (len(composite) >= 2 or _is_one_block(module, composite)) else []


def _blocks_of_classes(composite: list[nn.Module], counts: Counter[type[nn.Module]]) -> list[nn.Module]:
    """Return the blocks of a list with several classes, as in models that mix attention with other layers.

    Attention and feed-forward of one block can also form such a list. So one class must appear twice, or all classes
    must share their own base class. A child that contains blocks itself (a tower, a stage of a U-Net) is left to its
    own lists. Exceptions: its class appears twice next to plain blocks (experts), or transformers declares it a block.
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
    """Return whether the module only contains blocks and is never called itself."""
    blocks = _blocks_of(module) if _is_bare(module) else []
    return bool(blocks) and all(child in blocks for child in module.children() if _has_parameters(child))


def _is_bare(module: nn.Module) -> bool:
    """Return whether the module has no forward of its own, like a ModuleList."""
    return getattr(module.forward, "__func__", None) is nn.Module.forward


def takes_hooks(module: nn.Module) -> bool:
    """Return whether hooks on the module see its calls.

    Args:
        module: Any module. Hooks on TorchScript modules do not see calls.
    """
    return not isinstance(module, torch.jit.ScriptModule)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _called(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are really called: these, or the children of those without a forward."""
    return [
        called
        for module in modules
        for called in (_called(module.children()) if _is_bare(module) else [module])
        if _has_parameters(called)
    ]


def _is_one_block(module: nn.Module, composite: list[nn.Module]) -> bool:
    """Return whether a list of one module is a list of blocks. A pipeline stage may keep only one block."""
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
    """Return the modules that are in no block."""
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
    """The current pass of the module. It decides the order of gathers, and whether a forward releases its unit."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ValueObserver(Protocol):
    """Observes the values of units while they are gathered."""

    def came(self, unit: Unit) -> None:
        """Called after the parameters of a unit got their values.

        Args:
            unit: The gathered unit.
        """
        ...

    def goes(self, unit: Unit) -> None:
        """Called before the parameters of a unit are released.

        Args:
            unit: The gathered unit.
        """
        ...


class Unit:
    """Parameters that are gathered and released together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[FlatParam]) -> None:
        self.name, self.modules, self.flats = name, modules, flats
        self.trainable_count = sum(len(flat.parameters) for flat in flats if flat.trainable)
        self.gathers: list[PendingWork] | None = None
        """The pending gather; None: released; []: gathered."""
        self.cut_off = False
        """Whether waiting for the pending gather failed. The gather is not waited for again, and its memory stays
        until `forget_gather`."""
        self.missing = self.trainable_count
        """Number of gradients that this backward pass still has to compute."""
        self.gradients = [flat.gradient for flat in flats if flat.gradient is not None]
        self.calls = 0
        """Number of nested forwards of its modules that are running. Inside them, submodules need no separate
        gather."""
        self.open_calls: list[RemovableHandle] = []
        """Hooks on calls whose input gradients are not computed yet. Only for units with frozen parameters, which
        backward needs until these gradients are ready."""
        self.has_frozen = any(not flat.trainable for flat in flats)
        self.watch: ValueObserver | None = None

    def start_gather(self) -> None:
        """Start to gather all flats, unless the unit is gathered already.

        Raises:
            Exception: The gather of one flat failed; then all flats are released again.
        """
        if self.gathers is not None:
            return
        begun: list[PendingWork] = []
        try:
            for flat in self.flats:
                begun.append(flat.gather())
        except BaseException:  # Either all flats are gathered or none is.
            for flat, pending in zip(self.flats, begun, strict=False):
                with suppress(Exception):  # The first exception is the relevant one.
                    pending.wait()
                flat.release()
            raise
        self.gathers = begun

    def finish_gather(self) -> None:
        """Wait until the parameters have values.

        Raises:
            OffloadError: This rank's shard cannot be read; the gather is dropped.
            PeerLost: An earlier wait for this gather failed. Its own error was already raised, and may concern another
                world.
        """
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
        """Free the full parameters; the shards remain. Waits for a pending gather first."""
        self.calls = 0
        if self.gathers is not None:
            self.finish_gather()
            if self.watch is not None:
                self.watch.goes(self)
            for flat in self.flats:
                flat.release()
            self.gathers = None

    def forget_gather(self) -> None:
        """Drop a pending gather, because peers will send nothing more. This rank's own disk reads still finish,
        because they write into memory that is freed here.
        """
        for pending in self.gathers or ():
            if isinstance(pending, ReadThenGathered):
                with suppress(OffloadError):  # The caller that needs the values gets this error elsewhere.
                    pending.reading.wait()
            del pending  # Deletes the transfer before its memory is freed, so that it cannot write there any more.
        if self.gathers is not None:
            self.gathers, self.cut_off = [], False
            self.release()

    def forget_calls(self) -> None:
        """Remove the hooks of open calls, because their gradients will not be computed. A hook on several tensors and
        their graph refer to each other through C++, so the garbage collector cannot free them.
        """
        for handle in self.open_calls:
            handle.remove()
        self.open_calls.clear()

    def __repr__(self) -> str:
        return f"Unit({self.name}, {sum(flat.numel for flat in self.flats):,} parameters)"
