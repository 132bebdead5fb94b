"""Whether a run would fit its ranks, by the peak of a step and not by model states alone."""

from __future__ import annotations

from typing import Any

import pytest

from speedlab.config import RunConfig
from speedlab.layout import Layout, LayoutError
from speedlab.planner import model_states, parameter_count, predicted_peaks
from speedlab.planner.memory.fit import Peaks
from speedlab.planner.memory.predict import predict_memory
from speedlab.planner.setup import Setup

CONFIG = RunConfig(model="gpt-tiny", zero=0, batch={"global_size": 8})
GIB = 2**30


def peaks(config: RunConfig, ranks: int, *, capacity: int = GIB, **changes: Any) -> Peaks:
    options: dict[str, Any] = {"capacity_bytes": [capacity] * ranks, "dtype": "float32", "device": "cpu", **changes}
    found = predicted_peaks(config, ranks, **options)
    assert found is not None
    return found


def test_ranks_hold_what_the_planner_says_of_their_positions() -> None:
    config = CONFIG.replace(parallel={"pp": 2})
    setup = Setup.of_config(config, 4, dtype="float32")
    first, last = predict_memory(setup, device="cpu")
    found = peaks(config, 4)
    assert setup.layout == Layout(pp=2, dp=2)
    assert found.peak_bytes == (first.total, first.total, last.total, last.total)
    assert first.total != last.total


def test_activations_count_where_model_states_alone_would_fit() -> None:
    """Sequences twice as long leave model states as they are; the peak does not fit any more."""
    longer = CONFIG.replace(data={"sequence_length": 2 * CONFIG.data.sequence_length}, model={"context": 1024})
    capacity = max(peaks(CONFIG, 2).peak_bytes)
    states = model_states(parameter_count(longer.model), dp=2, stage=0, dtype="float32").total
    assert states < capacity
    assert peaks(CONFIG, 2, capacity=capacity).fits
    assert not peaks(CONFIG, 2, capacity=capacity - 1).fits
    assert not peaks(longer, 2, capacity=capacity).fits


def test_what_a_process_holds_beside_its_tensors_counts_by_rank() -> None:
    alone = peaks(CONFIG, 2)
    capacity = alone.peak_bytes[0] + 100
    alongside = peaks(CONFIG, 2, capacity=capacity, alongside_bytes=[100, 101])
    assert alongside.peak_bytes == (alone.peak_bytes[0] + 100, alone.peak_bytes[1] + 101)
    assert (alongside.fits, alongside.tightest) == (False, 1)
    assert peaks(CONFIG, 2, capacity=capacity, alongside_bytes=[100, 100]).fits


def test_the_smallest_rank_decides_where_capacities_differ() -> None:
    found = peaks(CONFIG, 2, capacity_bytes=[GIB, 1000])
    assert (found.fits, found.tightest) == (False, 1)


def test_a_model_of_the_users_own_is_not_predicted() -> None:
    options: dict[str, Any] = {"capacity_bytes": [GIB], "dtype": "float32", "device": "cpu"}
    count = parameter_count(CONFIG.model)
    assert predicted_peaks(CONFIG, 1, parameters=count + 1, **options) is None
    assert predicted_peaks(CONFIG, 1, parameters=count, **options) == peaks(CONFIG, 1)


def test_a_run_that_cannot_be_is_refused() -> None:
    with pytest.raises(LayoutError, match="3 ranks do not divide by pp 2"):
        peaks(CONFIG.replace(parallel={"pp": 2}), 3)
    with pytest.raises(ValueError, match="capacity_bytes has 1 numbers for 2 ranks; give one for each rank"):
        peaks(CONFIG, 2, capacity_bytes=[GIB])
    with pytest.raises(ValueError, match="beside_bytes has 3 numbers for 2 ranks"):
        peaks(CONFIG, 2, alongside_bytes=[1, 2, 3])
