"""Whether a change of shape fits: by the peak of a step, not by model states alone."""

from __future__ import annotations

from typing import Any

import pytest

from speedlab.config import RunConfig
from speedlab.config.errors import more_in
from speedlab.planner import parameter_count, predicted_peaks
from speedlab.telemetry.current_config import changed_config
from speedlab.trainer.collective_errors import CommandRefused
from speedlab.trainer.fit_check import RankCapacity, peaks_of, refuse_what_does_not_fit

MIB = 2**20
CONFIG = RunConfig(model="gpt-tiny", zero=2, precision="float32", batch={"global_size": 16, "micro_size": 2})


def held(capacity: int, **changes: Any) -> RankCapacity:
    """Of four ranks that hold 100 MiB of activations."""
    settings: dict[str, Any] = {
        "config": CONFIG,
        "parameters": parameter_count(CONFIG.model),
        "built_in": True,
        "dtype": "float32",
        "device": "cpu",
        "capacity": [capacity] * 4,
        "activations": [100 * MIB] * 4,
        "buffers": [MIB] * 4,
        "alongside": [0] * 4,
    }
    return RankCapacity(**{**settings, **changes})


def wanted(**changes: Any) -> RunConfig:
    return changed_config(CONFIG, 4, **changes)


def test_the_gpts_peak_is_the_planners() -> None:
    config = wanted(tp=2)
    expected = predicted_peaks(
        config, 4, capacity_bytes=[MIB] * 4, dtype="float32", device="cpu", alongside_bytes=[7] * 4
    )
    assert peaks_of(held(MIB, alongside=[7] * 4), config) == expected


def test_states_that_fit_do_not_make_a_peak_that_does() -> None:
    config = wanted(zero=0)
    memory = peaks_of(held(1), config).memory[0]
    between = memory.model_states + (memory.total - memory.model_states) // 2
    with pytest.raises(CommandRefused) as refused:
        refuse_what_does_not_fit(held(between), config)
    text = str(refused.value)
    assert text.startswith("pp 1 × dp 4 × tp 1 at ZeRO stage 0 would hold ")
    assert " MiB on rank 0 at the peak of a step, which has " in text
    assert "activations " in text
    assert "; what would fit: " in text
    assert refuse_what_does_not_fit(held(memory.total), config).memory[0] == memory


def test_what_a_process_holds_beside_tensors_counts() -> None:
    config = wanted(zero=0)
    peak = max(peaks_of(held(1), config).peak_bytes)
    assert refuse_what_does_not_fit(held(peak + 50 * MIB, alongside=[0, 50 * MIB, 0, 0]), config).fits
    with pytest.raises(CommandRefused, match=r"on rank 1 at the peak .* outside framework 51\.0 MiB"):
        refuse_what_does_not_fit(held(peak + 50 * MIB, alongside=[0, 51 * MIB, 0, 0]), config)


def test_a_change_that_holds_less_than_now_is_never_refused() -> None:
    """A run that does train shows that the prediction was too high."""
    assert not refuse_what_does_not_fit(held(1), wanted(zero=3, micro_batches=4)).fits


def test_changes_that_are_named_do_fit() -> None:
    config = wanted(zero=0)
    peak = max(peaks_of(held(1), config).peak_bytes)
    with pytest.raises(CommandRefused) as refused:
        refuse_what_does_not_fit(held(peak - 1), config)
    *named, more = str(refused.value).partition("what would fit: ")[2].split("; ")
    assert len(named) == 3
    assert more == more_in("memory")
    for words in named:
        change: dict[str, Any] = {
            name: int(value) for name, _, value in (word.partition("=") for word in words.split(", "))
        }
        assert peaks_of(held(peak - 1), changed_config(config, 4, **change)).fits


@pytest.mark.parametrize(
    ("changes", "activations"),
    [
        ({"zero": 0}, 100),  # As they are.
        ({"micro_batches": 4}, 50),  # Half the tokens of a micro-batch.
        ({"tp": 2, "micro_batches": 4}, 50),  # Half the model, and as many tokens.
        ({"pp": 2, "micro_batches": 8}, 50),  # Half the model and half the tokens, of two micro-batches at once.
    ],
)
def test_activations_of_another_model_are_in_proportion(changes: dict[str, Any], activations: int) -> None:
    own = held(1, built_in=False, parameters=1000)
    memory = peaks_of(own, changed_config(CONFIG, 4, built_in=False, **changes)).memory[0]
    assert memory.activations == activations * MIB
    assert memory.communication_buffers == MIB


def test_it_is_said_how_the_activations_of_another_model_are_known() -> None:
    with pytest.raises(CommandRefused, match="activations are those of now, in proportion to"):
        refuse_what_does_not_fit(held(100 * MIB, built_in=False, parameters=1000), wanted(zero=0))
