"""Model states by rank, and the table that holds them against what the ranks reported."""

from __future__ import annotations

from telemetry_samples import make_event, make_folder, make_record

from speedlab.cluster.stage_table import stage_table
from speedlab.config import RunConfig
from speedlab.layout import Layout
from speedlab.planner import model_states, parameter_count, parameters_by_rank, rank_parameters, rank_states
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.records import Ledger
from speedlab.telemetry.writer import RecordWriter

CONFIG = RunConfig(precision="bfloat16", batch={"global_size": 8, "accumulation": 1})


def test_every_rank_by_zeros_formula_over_its_own_parameters() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    held = parameters_by_rank(CONFIG.replace(parallel={"cut": (2, 4)}), layout)
    assert held == rank_parameters(CONFIG.model, layout, (2, 4))
    states = rank_states(CONFIG, layout, held, stage=3, dtype="bfloat16")
    assert states == [model_states(count, dp=2, stage=3, dtype="bfloat16") for count in held]


def test_sums_of_micro_batches_are_float32() -> None:
    once = rank_states(CONFIG, Layout(dp=2), [100], stage=2, dtype="bfloat16")[0]
    config = CONFIG.replace(batch={"accumulation": 2})
    assert rank_states(config, Layout(dp=2), [100], stage=2, dtype="bfloat16")[0].gradients == 2 * once.gradients
    assert rank_states(config, Layout(dp=2), [100], stage=2, dtype="float32")[0].gradients == 4 * 50


def test_a_model_that_is_not_the_configurations_is_taken_to_be_shared_evenly() -> None:
    assert parameters_by_rank(CONFIG, Layout(pp=2, tp=2), whole=1001) == [251] * 4
    whole = parameter_count(CONFIG.model)
    assert parameters_by_rank(CONFIG, Layout(dp=2), whole=whole) == [whole] * 2


def test_the_table_has_a_row_for_each_stage_and_layout(tmp_path) -> None:
    folder = make_folder(tmp_path, precision="float32", batch=8, zero=1)
    shape = {"pp": 1, "dp": 2, "tp": 1, "zero": 1}
    moved = {**shape, "pp": 2, "dp": 1}
    details = {"parameters": parameter_count(folder.config.model), "dtype": "float32", **shape}
    for rank in range(2):
        with RecordWriter(folder, rank, stream_hz=10) as writer:
            for step in range(1, 7):
                ledger = Ledger(parameters=1000 * (rank + 1) if step > 3 else 5000)
                writer.write(make_record(step, rank, zero_stage=1, ledger=ledger, seconds=0.1 * step))
            if rank == 0:
                writer.event(make_event("started", details=details))
                reported = {"before": shape, "after": moved, "seconds": 1.5}
                writer.event(make_event("reshaped", 3, details=reported))
    feed = Feed(folder)
    feed.poll(files=True)
    first, second = stage_table(feed)
    feed.close()
    assert (first["stage"], first["layout"], first["steps"], first["parameters"]) == (1, "pp 1 × dp 2 × tp 1", 3, 5000)
    assert (second["stage"], second["layout"], second["steps"], second["parameters"]) == (
        1,
        "pp 2 × dp 1 × tp 1",
        3,
        2000,
    )
    assert first["formula_parameters"] == 4 * parameter_count(folder.config.model)
    held = parameters_by_rank(folder.config, Layout(pp=2))
    assert second["formula_parameters"] == 4 * max(held)
    assert second["formula_optimizer"] == 8 * max(held)  # dp is 1: nobody to share with.
    assert (first["change_seconds"], second["change_seconds"]) == (None, 1.5)
    assert "pp 2 × dp 1 × tp 1" in str(stage_table(feed))


def test_the_speed_of_a_stage_is_that_of_warm_steps(tmp_path) -> None:
    # A run's start costs more steps than the first: half of them and one, here.
    folder = make_folder(tmp_path, zero=0)
    seconds = [4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6]
    with RecordWriter(folder, 0, stream_hz=10) as writer:
        for step, took in enumerate(seconds, 1):
            writer.write(make_record(step, zero_stage=0 if step <= 10 else 1, tokens=600, seconds=took))
        details = {"before": {"dp": 1, "zero": 0}, "after": {"dp": 1, "zero": 1}, "seconds": 0.1}
        writer.event(make_event("reshaped", 10, details=details))
    feed = Feed(folder)
    feed.poll(files=True)
    first, second = stage_table(feed)
    feed.close()
    assert (first["tokens_per_second"], second["tokens_per_second"]) == (1200, 1000)
