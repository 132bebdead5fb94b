"""A unit of parameters, without processes (`speedlab/parallel/zero/units.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from speedlab.offload import OffloadError
from speedlab.parallel.zero.comm_groups import ReadThenGathered
from speedlab.parallel.zero.units import ROOT, Unit, plan_units


@pytest.mark.parametrize("fails", [False, True])
def test_forgotten_gathers_leave_no_read_under_way(fails: bool) -> None:
    """Peers send nothing any more; what this rank reads into its memory is over before that is released."""
    happened: list[str] = []

    def read() -> None:
        happened.append("read")
        if fails:
            raise OffloadError("the disk is gone")

    def from_peers() -> None:
        raise AssertionError("nobody sends")

    flat: Any = SimpleNamespace(
        parameters=[], trainable=True, gradient=None, release=lambda: happened.append("release")
    )
    unit = Unit("blocks.0", [], [flat])
    reading: Any = SimpleNamespace(wait=read)
    other: Any = SimpleNamespace(wait=from_peers)
    unit.gathers = [ReadThenGathered(reading, other, torch.empty(2), torch.empty(1)), other]
    unit.forget_gather()
    assert happened == ["read", "release"]
    assert unit.gathers is None
    unit.forget_gather()
    assert happened == ["read", "release"]


def test_a_unit_is_gathered_whole_or_not_at_all() -> None:
    """The second of its flats cannot be read: what has begun for the first ends, and it is freed again."""
    happened: list[str] = []

    def fails() -> None:
        raise OffloadError("the disk is gone")

    first: Any = SimpleNamespace(
        parameters=[], trainable=True, gradient=None, release=lambda: happened.append("release"),
        gather=lambda: SimpleNamespace(wait=lambda: happened.append("came")),
    )  # fmt: skip
    second: Any = SimpleNamespace(parameters=[], trainable=True, gradient=None, gather=fails)
    unit = Unit("blocks.0", [], [first, second])
    for _ in range(2):  # The next try begins again.
        with pytest.raises(OffloadError, match="the disk is gone"):
            unit.start_gather()
        assert unit.gathers is None
        assert happened == ["came", "release"]
        happened.clear()
    second.gather = first.gather
    unit.start_gather()
    unit.finish_gather()
    assert happened == ["came", "came"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class WithoutForward(nn.Module):
    """Called by methods of other names, which call what it holds; it holds a parameter itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.scale = Pair(), nn.Parameter(torch.ones(2))


def layers(*depths: int) -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList(Pair() for _ in range(depth)) for depth in depths)


SHARED = Pair()

NOBODY_CALLS = {
    "a layer that all blocks share": (
        nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), SHARED]) for _ in range(2)),
        ["0.0", "1.0"],
        [f"0.1.{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")],
    ),
    "each inner list has blocks": (layers(2, 3), ["0.0", "0.1", "1.0", "1.1", "1.2"], []),
    "blocks that stand alone": (layers(1, 2), ["0.0", "1.0", "1.1"], []),
    "layers of a block": (
        nn.ModuleList(nn.ModuleList([Pair(), nn.Linear(2, 2), nn.GELU()]) for _ in range(2)),
        ["0.0 0.1", "1.0 1.1"],
        [],
    ),
    "layers by name": (
        nn.ModuleList(nn.ModuleDict({"up": Pair(), "down": nn.Sequential(nn.Linear(2, 2))}) for _ in range(2)),
        ["0.up 0.down", "1.up 1.down"],
        [],
    ),
    "one list of blocks, one of layers": (
        nn.ModuleList([*layers(2), nn.ModuleList([Pair(), nn.Linear(2, 2)])]),
        ["1.0 1.1", "0.0", "0.1"],
        [],
    ),
    "classes without forward": (
        nn.ModuleList(WithoutForward() for _ in range(2)),
        ["0.pair", "1.pair"],
        ["0.scale", "1.scale"],
    ),
}


@pytest.mark.parametrize("name", NOBODY_CALLS)
def test_units_of_what_nobody_calls_are_what_it_holds(name: str) -> None:
    """Their hooks would never run, and their parameters never come."""
    blocks, units, of_root = NOBODY_CALLS[name]
    names = {module: name for name, module in blocks.named_modules()}
    root, *plans = plan_units(nn.Sequential(blocks))
    assert [" ".join(names[module] for module in plan.modules) for plan in plans] == units
    assert root.name == ROOT
    assert list(root.parameters) == [f"0.{each}" for each in of_root]
    held = [each.removeprefix("0.") for plan in plans for each in plan.parameters]
    assert sorted([*held, *of_root]) == sorted(name for name, _ in blocks.named_parameters())


def test_named_by_the_user_a_list_is_what_it_holds() -> None:
    model = nn.ModuleDict({"blocks": layers(1, 2)})
    plans = plan_units(model, ["blocks.1"])
    assert [plan.name for plan in plans] == [ROOT, "blocks.1"]
    assert plans[1].modules == list(model["blocks"][1])


class Other(Pair):
    """Another kind of block, with Pair as its base."""


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.only(x)


class Mixture(Alone):
    """A block with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Pair() for _ in range(2))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OtherStage(Stage):
    pass


class Tower(Alone):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(2))


SEVERAL_CLASSES = {
    "a class comes twice": ([Pair, Alone, Pair], ["0", "1", "2"]),
    "they share a base class": ([Pair, Other], ["0", "1"]),
    "two layers of one block": ([Pair, Alone], []),
    "blocks with experts": ([Pair, Mixture, Pair, Mixture], ["0", "1", "2", "3"]),
    "stages of a U-Net": ([Stage, OtherStage, Stage], [f"{s}.blocks.{b}" for s in range(3) for b in range(2)]),
    "a stem, a body and a head": ([Alone, Tower, Alone], ["0", "2", "1.blocks.0", "1.blocks.1"]),
    "bare layers between": ([Pair, lambda: nn.Linear(2, 2), Alone, Pair], ["0", "2", "3"]),
}


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda modules: nn.Sequential(*modules)], ids=["list", "sequential"])
@pytest.mark.parametrize("name", SEVERAL_CLASSES)
def test_units_of_lists_of_several_classes(name: str, kind: Any) -> None:
    classes, expected = SEVERAL_CLASSES[name]
    model = nn.Module()
    model.layers = kind([make() for make in classes])
    root, *plans = plan_units(model)
    assert [plan.name.removeprefix("layers.") for plan in plans] == expected
    held = [each for plan in [root, *plans] for each in plan.parameters]
    assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def test_layers_of_a_block_stay_together() -> None:
    """As many write a transformer: a list of lists of attention and feed-forward."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleList([Pair(), Alone()]) for _ in range(2))})
    assert [plan.name for plan in plan_units(model)] == [ROOT, "layers.0", "layers.1"]
