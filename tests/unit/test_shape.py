"""A run's present shape, and the configuration that a change of it leads to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import make_event

from speedlab.config import ConfigError, RunConfig
from speedlab.layout import Layout, LayoutError
from speedlab.telemetry.current_config import change_mark, changed_config, differences, present_config, shape_after

CONFIG = RunConfig(batch={"global_size": 32, "micro_size": 4})


def test_what_is_not_named_stays_and_the_global_batch_with_it() -> None:
    changed = changed_config(CONFIG, 4, tp=2, pp=2)
    assert changed.layout(4) == Layout(pp=2, dp=1, tp=2)
    assert changed.batch.resolve(1).model_dump() == {"global_size": 32, "micro_size": 4, "accumulation": 8, "dp": 1}
    assert changed.zero == CONFIG.zero
    assert changed_config(CONFIG, 4, zero=3) == CONFIG.replace(zero=3)


def test_a_cut_belongs_to_its_pipeline() -> None:
    cut = changed_config(CONFIG, 4, pp=4, cut=(1, 1, 2, 2))
    assert cut.parallel.cut == (1, 1, 2, 2)
    assert changed_config(cut, 4, zero=1).parallel.cut == (1, 1, 2, 2)
    assert changed_config(cut, 4, pp=2).parallel.cut is None


def test_a_micro_batch_that_does_not_divide_makes_way() -> None:
    changed = changed_config(RunConfig(batch={"micro_size": 3}), 4, pp=4)
    assert changed.batch.resolve(1).model_dump() == {"global_size": 12, "micro_size": 3, "accumulation": 4, "dp": 1}
    changed = changed_config(RunConfig(batch={"micro_size": 3}), 4, pp=4, micro_batches=6)
    assert changed.batch.resolve(1).micro_size == 2


def test_rules_of_schedules_are_held_against_the_batch_that_follows() -> None:
    with pytest.raises(LayoutError, match="takes micro-batches in rounds of pp 2: 5 do not divide"):
        changed_config(RunConfig(batch=10), 2, pp=2, schedule="interleaved", micro_batches=5)


def test_an_unknown_change_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown key 'microbatches'; the nearest known key is 'micro_batches'"):
        changed_config(CONFIG, 4, microbatches=2)


def test_the_present_shape_is_what_the_newest_change_has_left() -> None:
    assert present_config(CONFIG, [make_event("started")], 4) is CONFIG
    events = [
        make_event("reshaped", 3, details={"before": {"zero": 2}, "after": {"zero": 1, "pp": 4, "dp": 1, "tp": 1}}),
        make_event("reshaped", 9, details={"before": {}, "after": {"zero": 3, "pp": 2, "dp": 1, "tp": 2}}),
        make_event("paused", 9),
    ]
    now = present_config(CONFIG, events, 4)
    assert (now.zero.stage, now.layout(4)) == (3, Layout(pp=2, dp=1, tp=2))
    assert present_config(CONFIG, events, 6) is CONFIG


def test_events_that_told_only_the_stage_are_understood() -> None:
    event = make_event("reshaped", 3, details={"before": 2, "zero": 3})
    assert shape_after(event) == {"zero": 3}
    assert present_config(CONFIG, [event], 4).zero.stage == 3


def test_a_plot_marks_a_change_in_few_letters() -> None:
    before = {"zero": 2, "pp": 1, "dp": 4, "tp": 1, "schedule": "1f1b"}
    for change, mark in [
        ({"zero": 3}, "2→3"),
        ({"pp": 2, "dp": 2}, "pp 2 × dp 2 × tp 1"),
        ({"zero": 1, "dp": 2, "tp": 2}, "2→1, pp 1 × dp 2 × tp 2"),
        ({"schedule": "gpipe"}, ""),
    ]:
        assert change_mark(make_event("reshaped", details={"before": before, "after": {**before, **change}})) == mark
    assert change_mark(make_event("reshaped", details={"before": 2, "zero": 3})) == "2→3"


@given(
    before=st.sampled_from([{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2, "micro_batches": 4}]),
    after=st.sampled_from([{"zero": 0}, {"pp": 4, "tp": 1, "schedule": "gpipe"}, {"tp": 2}, {"pp": 1, "tp": 1}]),
)
def test_differences_lead_from_one_shape_to_the_other(before: dict, after: dict) -> None:
    running = changed_config(CONFIG, 4, **before)
    wanted = changed_config(running, 4, **after)
    found = differences(running, wanted, 4)
    assert differences(changed_config(running, 4, **found), wanted, 4) == {}
    assert differences(wanted, wanted, 4) == {}
