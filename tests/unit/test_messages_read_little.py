"""Messages read at most three elements of what they are about: a data set may have no end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import speedlab
from speedlab.config import ConfigError, RunConfig, as_config
from speedlab.config.errors import briefly


class Endless(Dataset[Tensor]):
    """Items by any number, as Python's own way of making a list asks for them."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> Tensor:
        self.reads += 1
        assert self.reads <= 50, "a message reads on and on"
        return torch.zeros(4)

    def __getitem__(self, index: int) -> Tensor:
        return self.read()


class Stream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.source = Endless()

    @property
    def reads(self) -> int:
        return self.source.reads

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.source.read()

    def __len__(self) -> int:
        return 10


CALLS: dict[str, Callable[[Any], object]] = {
    "data": lambda data: RunConfig(data=data),
    "of a dict": lambda data: as_config({"data": data}),
    "replace": lambda data: RunConfig().replace(data=data),
    "source": lambda data: RunConfig(data={"source": data}),
    "model": lambda data: RunConfig(model=data),
    "mask": lambda data: RunConfig(model={"attention": {"mask": data}}),
    "cut": lambda data: RunConfig(parallel={"cut": data}),
    "betas": lambda data: RunConfig(optimizer={"betas": data}),
    "zero": lambda data: as_config({"train_batch_size": 4, "zero_optimization": data}),
    "config": lambda data: speedlab.initialize(model=nn.Linear(2, 2), config={"data": data}),
    "parameters": lambda data: speedlab.initialize(model=nn.Linear(2, 2), model_parameters=data),
    "units": lambda data: speedlab.initialize(model=nn.Linear(2, 2), units=data),
    "training data": lambda data: speedlab.initialize(model=nn.Linear(2, 2), training_data=data),
}


@pytest.mark.parametrize("kind", [Endless, Stream])
@pytest.mark.parametrize("call", CALLS)
def test_a_data_set_without_an_end_is_refused(kind: type[Any], call: str) -> None:
    data = kind()
    with pytest.raises(ValueError, match=kind.__name__ if call != "zero" else "zero_optimization"):
        CALLS[call](data)
    assert data.reads <= 3


def test_an_iterable_data_set_with_a_length_has_no_items_by_number() -> None:
    with pytest.raises(ConfigError, match="training_data: a Stream has no length or no items by number"):
        CALLS["training data"](Stream())


def test_what_messages_show() -> None:
    assert briefly("text") == "'text'"
    assert briefly(2.5) == "2.5"
    assert briefly(list(range(1000))) == "a list of 1000 (0, 1, 2, …)"
    assert briefly({"a": 1}) == "a dict of 1 ('a')"
    assert briefly(()) == "an empty tuple"
    assert briefly(Endless()) == "a Endless"
    assert len(briefly("x" * 10_000)) < 250
