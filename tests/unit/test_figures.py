"""The plots as data: what is stacked, in which unit and colour, how much of a long run is drawn."""

from __future__ import annotations

import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from telemetry_samples import make_event, make_record

from speedlab.display.figure_style import COLOURS, INK
from speedlab.display.formatting import byte_unit, bytes_text, count_text, seconds_text
from speedlab.hardware import cpu_devices
from speedlab.planner.memory.rank_memory import RankMemory
from speedlab.telemetry import history as series
from speedlab.telemetry.figures import (
    History,
    anatomy_by_rank_figure,
    anatomy_figure,
    figures,
    gradient_figure,
    header,
    loss_figure,
    memory_figure,
    plain,
    states_figure,
    throughput_figure,
)
from speedlab.telemetry.figures.memory import states_are_small
from speedlab.telemetry.figures.steps import HistoryRange, loss_values
from speedlab.telemetry.history import bucket_extremes
from speedlab.telemetry.prediction import RunPrediction
from speedlab.telemetry.records import CATEGORIES, PHASES, Ledger, RunState
from speedlab.telemetry.run_folder import Status

MIB = 2**20


def history(steps: int = 3, ranks: int = 2, **changes) -> History:
    records = {r: [make_record(s, r, **changes) for s in range(1, steps + 1)] for r in range(ranks)}
    return History.of(records)


def ledger(**parts: int) -> Ledger:
    return Ledger(**{"reported_bytes": sum(v for k, v in parts.items() if k != "capacity_bytes"), **parts})


# Memory


def test_ranks_of_several_hosts_stand_apart_and_say_whose_they_are():
    made = history(ranks=4, ledger=ledger(parameters=50 * MIB, capacity_bytes=100 * MIB))
    made.events = [make_event("started", details={"hosts": ["<left>", "<left>", "right", "right"]})]
    for figure in (memory_figure(made, devices=cpu_devices(4)), anatomy_by_rank_figure(made)):
        names = figure["data"][0]["x"]
        assert [name.partition("<br>")[2] for name in names] == ["&lt;left&gt;"] * 2 + [""] + ["right"] * 2
        assert figure["data"][0]["y"].tolist()[2] == 0.0
        bars = [[0, "device"], [1, "device"], [None, "device"], [2, "device"], [3, "device"]]
        assert figure["layout"]["meta"] == {"bars": bars, "ranks": [0, 1, 2, 3]}
    capacity = [shape for shape in memory_figure(made)["layout"]["shapes"] if shape["type"] == "line"]
    assert [shape["x0"] for shape in capacity] == [-0.5, 0.5, 2.5, 3.5], "none in the gap"
    hatched = memory_figure(made)["data"][-1]
    assert hatched["marker"]["line"]["width"] == [1, 1, 0, 1, 1]
    made.events = []
    assert memory_figure(made)["data"][0]["x"] == [f"rank {rank}" for rank in range(4)]


def test_bars_stack_every_category_in_the_ledgers_order_and_colours():
    whole = ledger(**{name: (i + 1) * MIB for i, name in enumerate(CATEGORIES)}, capacity_bytes=100 * MIB)
    figure = memory_figure(history(ledger=whole))
    assert [trace["name"] for trace in figure["data"]][:4] == [
        "parameters",
        "gradients",
        "master weights",
        "optimizer moments",
    ]
    assert [float(trace["y"][1]) for trace in figure["data"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [trace["marker"]["color"] for trace in figure["data"]][:7] == [COLOURS[name] for name in CATEGORIES[:7]]
    assert figure["data"][7]["marker"]["pattern"]["shape"] == "/"
    assert figure["layout"]["yaxis"]["title"]["text"] == "MiB"
    assert figure["data"][0]["y"].dtype == np.float32


def test_capacity_is_a_line_when_in_sight_and_a_note_when_far_above():
    near = memory_figure(history(ledger=ledger(parameters=50 * MIB, capacity_bytes=100 * MIB)))["layout"]
    assert [shape["y0"] for shape in near["shapes"]] == [100, 100]
    assert near["annotations"][0]["text"] == "capacity 100 MiB"
    far = memory_figure(history(ledger=ledger(parameters=50 * MIB, capacity_bytes=16 * 1024 * MIB)))["layout"]
    assert far["shapes"] == []
    assert far["annotations"][0]["text"] == "↑ capacity 16.0 GiB, 0.3% used"


def test_prediction_is_an_outline_in_the_readers_colour_with_its_error():
    made = history(ledger=Ledger(parameters=4 * MIB, activations=MIB, outside_framework=9 * MIB))
    rank = RankMemory(parameters=3 * MIB, activations=MIB, outside_framework=7 * MIB)
    made.predicted = RunPrediction(memory=[rank, rank], speeds=((0, 4096.0),))
    layout = memory_figure(made)["layout"]
    assert [(shape["y0"], shape["y1"], shape["name"]) for shape in layout["shapes"]] == [(0, 4, "ink")] * 2
    assert layout["annotations"][-1]["text"] == "□ predicted 4.0 MiB, 20 % less than measured (5.0 MiB)"
    states = states_figure(made)["layout"]
    assert [shape["y1"] for shape in states["shapes"]] == [3, 3]
    assert states["annotations"][0]["text"] == "□ predicted 3.0 MiB, 25 % less than measured (4.0 MiB)"


def test_predicted_speed_is_a_line_that_follows_changes_of_shape_and_tells_its_error():
    made = History.of({0: [make_record(step) for step in range(1, 11)]})
    made.predicted = RunPrediction(memory=[], speeds=((0, 4096.0), (5, 16384.0)), note="(not yet calibrated)")
    trace = throughput_figure(made)["data"][1]
    assert trace["y"].tolist() == [4096.0] * 5 + [16384.0] * 5
    reported = header(made, name="sample", status=Status(state=RunState.RUNNING, step=10, steps=40)).text
    assert (
        "8.19 k tokens/s (predicted 16.4 k, 2 times what was measured)" in reported
    )  # Measured: 4,096 tokens in 0.5 s.
    assert "(not yet calibrated)" in trace["hovertemplate"]


def test_negative_remainder_is_drawn_below_zero():
    figure = memory_figure(history(ledger=Ledger(parameters=4 * MIB, other_framework=-MIB, reported_bytes=3 * MIB)))
    assert figure["layout"]["barmode"] == "relative"
    assert float(figure["data"][CATEGORIES.index("other_framework")]["y"][0]) == -1


def test_ranks_carry_the_names_of_their_devices():
    assert memory_figure(history(), devices=cpu_devices(2))["data"][0]["x"][0].startswith("0 · cpu ")
    assert memory_figure(history())["data"][0]["x"] == ["rank 0", "rank 1"]


def test_more_than_16_ranks_become_minimum_median_and_maximum_with_outliers_named():
    records = {r: [make_record(1, r, ledger=ledger(parameters=(100 + (r == 5) * 40) * MIB))] for r in range(20)}
    figure = memory_figure(History.of(records))
    assert len(figure["data"][0]["y"]) == 3
    assert figure["data"][0]["x"][2] == "maximum (rank 5)"
    assert figure["data"][0]["y"].tolist() == [100, 100, 140]
    assert figure["layout"]["annotations"][-1]["text"] == "outliers: rank 5 (+40%)"


def test_model_states_are_drawn_alone_where_the_process_holds_far_more():
    small = history(ledger=ledger(parameters=MIB, optimizer_moments=2 * MIB, outside_framework=400 * MIB))
    assert states_are_small(small)
    figure = states_figure(small)
    assert [float(trace["y"][0]) for trace in figure["data"]] == [1, 0, 0, 2]
    assert figure["layout"]["annotations"][0]["text"] == "of 403 MiB in use"
    assert not states_are_small(history(ledger=ledger(parameters=MIB, outside_framework=MIB)))


# Over steps


def test_loss_figure_has_raw_smoothed_rate_and_heldout():
    entries = [make_record(1, loss=4.0), make_record(2, loss=2.0, heldout_loss=3.5)]
    first = make_event("evaluated", details={"heldout_loss": 8.0})
    raw, smoothed, rate, heldout = loss_figure(History.of({0: entries}, [first]))["data"]
    assert raw["y"].tolist() == [4, 2]
    assert raw["opacity"] < smoothed["opacity"]
    # Bias-corrected: (0.9 · 4 + 2) / (0.9 + 1).
    assert smoothed["y"].tolist() == pytest.approx([4, (0.9 * 4 + 2) / 1.9])
    assert rate["yaxis"] == "y2"
    assert (heldout["x"].tolist(), heldout["y"].tolist()) == ([0, 2], [8, 3.5])
    assert heldout["meta"] == "ink"
    assert heldout["line"]["color"] == INK


@pytest.mark.parametrize(("closed", "first"), [(True, 0), (False, 0), (True, 2), (False, 4)])
def test_a_bucket_is_drawn_by_its_lowest_and_its_highest_point_in_their_order(closed: bool, first: int):
    nan = math.nan
    buckets = [[4, 9, 1, 5], [nan, 3, 2, nan], [nan] * 4, [7, 7, 7, 7], [8]]
    expected = [[9, 1], [3, 2], [nan], [7], [8]][first : None if closed else 4]
    y = np.array([value for bucket in buckets for value in bucket], dtype=float)
    steps, values = bucket_extremes(np.arange(len(y)), y, 4, closed=closed, first=first)
    reported = [value for bucket in expected for value in bucket]
    assert np.array_equal(values, reported, equal_nan=True)
    assert np.array_equal(y[steps], reported, equal_nan=True)
    assert all(np.diff(steps) > 0)


def test_a_nan_loss_leaves_the_smoothed_curve_as_it_was():
    entries = [make_record(1, loss=4.0), make_record(2, loss=math.nan), make_record(3, loss=4.0)]
    drawn = loss_figure(History.of({0: entries}))
    assert drawn["data"][1]["y"].tolist() == [4, 4, 4]
    assert plain(drawn)["data"][0]["y"] == [4, None, 4]


def test_events_are_marks_with_their_text_escaped():
    events = [
        make_event("started"),
        make_event("reshaped", 80, text="zero stage 2 → 3", details={"before": 2, "zero": 3}),
        make_event("warning", 90, text="<b>disk</b>"),
    ]
    layout = loss_figure(History.of({0: [make_record(100)]}, events))["layout"]
    assert [note["text"] for note in layout["annotations"]] == ["▼ 2→3", "▲"]
    assert [shape["x0"] for shape in layout["shapes"]] == [80, 90]
    assert layout["annotations"][1]["hovertext"] == "warning at step 90: &lt;b&gt;disk&lt;/b&gt;"


def test_throughput_has_the_share_of_peak_only_when_the_peak_is_known():
    entries = {r: [make_record(1, r, tokens=1000, seconds=0.5, flops=1e9)] for r in range(2)}
    assert len(throughput_figure(History.of(entries))["data"]) == 1
    started = make_event("started", details={"peak_flops": 8e9})
    speed, share = throughput_figure(History.of(entries, [started]))["data"]
    assert speed["y"].tolist() == [2000]
    assert share["y"].tolist() == [50]  # 2 ranks · 1e9 / 0.5 s of 8e9


def test_anatomy_shows_the_rest_of_a_step():
    figure = anatomy_figure(history(seconds=1.0, phases={"forward": 0.25, "backward": 0.5}))
    assert [trace["name"] for trace in figure["data"]] == [*(phase for phase in PHASES if phase != "offload"), "other"]
    assert [float(trace["y"][0]) for trace in figure["data"]] == [0, 250, 500, 0, 0, 250]
    by_rank = anatomy_by_rank_figure(history(seconds=1.0, phases={"forward": 0.25}))
    assert by_rank["data"][1]["y"].tolist() == [250, 250]


# Long runs


def test_a_long_run_is_drawn_with_bounded_points_and_keeps_its_spikes():
    entries = [make_record(step, loss=99.0 if step == 7001 else 5.0) for step in range(1, 20_001)]
    whole = History.of({0: entries})
    drawn = figures(whole)
    assert sum(len(trace["x"]) for name in ("loss", "throughput") for trace in drawn[name]["data"]) <= 2000
    assert max(len(trace["x"]) for trace in drawn["loss"]["data"]) <= series.POINTS
    assert len(drawn["anatomy"]["data"][0]["x"]) <= series.BARS
    assert float(drawn["loss"]["data"][0]["y"].max()) == 99
    assert float(drawn["loss"]["data"][1]["x"][-1]) == 20_000


def test_a_run_that_went_back_and_came_further_between_two_looks_is_drawn_anew():
    entries = [make_record(step) for step in range(1, 11)]
    whole = History.of({0: entries})
    again = entries[:5] + [make_record(step, loss=1.0, time=2000.0 + step) for step in range(6, 13)]
    assert whole.update({0: again}, ()) is True
    assert whole.lead.column("loss").tolist() == [record.loss for record in again]
    assert whole.update({0: again}, ()) is False


class Newest(list):
    """Records of which only the last ones may be asked for."""

    def __len__(self) -> int:
        raise AssertionError("the whole file is read for this")

    def __bool__(self) -> bool:
        return True


def test_of_other_ranks_only_the_newest_records_are_asked_for():
    entries = {rank: [make_record(step, rank) for step in range(1, 31)] for rank in range(3)}
    few = {0: entries[0]} | {rank: Newest(entries[rank]) for rank in (1, 2)}
    whole = History.of(few)
    assert {rank: record.step for rank, record in whole.latest.items()} == {0: 30, 1: 30, 2: 30}
    assert whole.lead.length == 30
    assert whole.most_bytes("everything") == sum(getattr(entries[2][-1].ledger, name) for name in CATEGORIES)


@pytest.mark.parametrize(("length", "limit", "size"), [(0, 4, 1), (4, 4, 1), (5, 4, 2), (8, 4, 2), (9, 4, 4)])
def test_stride_is_the_least_power_of_two(length, limit, size):
    assert series.stride(length, limit) == size


def test_buckets_that_are_whole_never_change_when_the_run_goes_on():
    shorter, longer = history(steps=37, ranks=1), history(steps=41, ranks=1)
    before, after = loss_values(shorter, HistoryRange(4, 0, False)), loss_values(longer, HistoryRange(4, 0, False))
    rest = loss_values(longer, HistoryRange(4, 37 // 4, False))
    for (x, y), (later_x, later_y), (rest_x, rest_y) in zip(before, after, rest, strict=True):
        assert np.concatenate([x, rest_x]).tolist() == later_x.tolist()
        assert np.concatenate([y, rest_y]).tolist() == later_y.tolist()


def test_a_chosen_smoothing_is_that_share_of_the_past_also_after_steps_were_replaced():
    entries = [make_record(step, loss=float(step), grad_norm=1.0 / step) for step in range(1, 9)]
    made = History.of({0: entries})
    for share in (0.0, 0.5, 0.99):
        weights = [[share ** (i - j) for j in range(i + 1)] for i in range(8)]
        usual = [sum(w * (j + 1) for j, w in enumerate(each)) / sum(each) for each in weights]
        assert made.lead.smoothed_by(share).tolist() == pytest.approx(usual)
    assert made.lead.smoothed_by(0.0, "grad_norm").tolist() == [1.0 / step for step in range(1, 9)]
    raw, smoothed = gradient_figure(made, HistoryRange(1, 0, True, 0.0))["data"]
    assert raw["y"].tolist() == smoothed["y"].tolist()
    again = [*entries[:4], *(make_record(step, loss=100.0, time=5000.0) for step in range(5, 8))]
    assert made.update({0: [*entries, *again[4:]]}, [])
    assert made.lead.smoothed_by(0.0).tolist() == [1.0, 2.0, 3.0, 4.0, 100.0, 100.0, 100.0]


def test_updating_piece_by_piece_is_the_same_as_at_once():
    entries = [make_record(step, loss=1 / step) for step in range(1, 700)]
    piecewise = History()
    for end in range(0, 700, 50):
        assert piecewise.update({0: entries[:end]}, []) is False
    piecewise.update({0: entries}, [])
    assert piecewise.lead.smoothed.tolist() == History.of({0: entries}).lead.smoothed.tolist()


def test_steps_after_a_return_to_a_checkpoint_replace_the_abandoned_ones():
    entries = [make_record(step, loss=1.0, heldout_loss=float(step)) for step in range(1, 11)]
    kept = History.of({0: entries})
    entries += [make_record(6, loss=2.0), make_record(7, loss=2.0)]
    assert kept.update({0: entries}, []) is True
    assert kept.lead.column("step").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert kept.lead.column("loss").tolist() == [1, 1, 1, 1, 1, 2, 2]
    assert [step for step, _ in kept.heldout] == [1, 2, 3, 4, 5]


# Everything together


def test_all_figures_are_figures_to_plotly_and_json_to_browsers():
    full = history(ledger=ledger(parameters=MIB, capacity_bytes=2 * MIB))
    for figure in [
        *figures(full).values(),
        *figures(History()).values(),
    ]:
        go.Figure(plain(figure))
        json.dumps(plain(figure), allow_nan=False)


def test_header_says_state_speed_and_loss():
    entries = {r: [make_record(131, r, loss=5.91, tokens=20_600, heldout_loss=6.02)] for r in range(4)}
    status = Status(state=RunState.RUNNING, steps=2000, rank_pids=(1, 2, 3, 4))
    line = header(History.of(entries), name="quickstart", status=status)
    assert line.text == (
        "quickstart · step 131/2,000 · 41.2 k tokens/s · loss 5.91 (held-out 6.02) · ZeRO stage 2 · 4 engines"
    )
    assert (line.state, line.mark) == ("running", "●")


def test_header_of_a_run_without_records():
    line = header(History(), name="new", status=Status(steps=10))
    assert line.text == "new · step 0/10 · 0 engines"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(312 * MIB), "312 MiB"),
        (bytes_text(1.4 * 2**30), "1.4 GiB"),
        (count_text(950), "950"),
        (count_text(999_700), "1 M"),
        (count_text(41_234), "41.2 k"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(1.24), "1.24 s"),
        (seconds_text(185), "3 min 5 s"),
        (seconds_text(3599.9), "59 min 59 s"),
        (seconds_text(93_785), "26 h 3 min"),
    ],
)
def test_numbers_as_text(text, expected):
    assert text == expected


def test_units_hold_numbers_of_one_to_four_digits():
    assert byte_unit(1023) == ("B", 1)
    assert byte_unit(1024) == ("KiB", 1024)
    assert byte_unit(3 * 2**30) == ("GiB", 2**30)


def test_bars_keep_the_scale_of_the_most_that_was_held():
    big, small = ledger(parameters=40 * MIB), ledger(parameters=10 * MIB)
    figure = states_figure(History.of({0: [make_record(1, ledger=big), make_record(2, ledger=small)]}))
    assert figure["data"][0]["y"].tolist() == [10]
    bottom, top = figure["layout"]["yaxis"]["range"]
    assert bottom == 0
    assert 40 < top < 44


def test_an_axis_reaches_below_zero_only_for_a_negative_remainder():
    figure = memory_figure(history(ledger=Ledger(parameters=4 * MIB, other_framework=-MIB, reported_bytes=3 * MIB)))
    assert figure["layout"]["yaxis"]["range"][0] == -2
    assert memory_figure(history(ledger=ledger(parameters=MIB)))["layout"]["yaxis"]["range"][0] == 0


@pytest.mark.parametrize(
    ("state", "after", "note"),
    [
        (RunState.RUNNING, 4.0, ""),
        (RunState.RUNNING, 12.0, "no step for 12 s; they took 500 ms each"),
        (RunState.PAUSED, 12.0, ""),
    ],
)
def test_header_tells_of_a_run_that_makes_no_steps(state, after, note):
    steps = History.of(
        {0: [make_record(1, time=100.0), make_record(2, time=100.5)]}, [make_event("started", time=90.0)]
    )
    assert header(steps, name="x", status=Status(state=state), now=100.5 + after).note == note


def test_header_tells_why_a_run_failed():
    status = Status(state=RunState.FAILED, text="NaN loss at step 7 on rank 1")
    assert header(History(), name="x", status=status).note == "NaN loss at step 7 on rank 1"


def test_a_long_name_of_a_host_leaves_room_for_the_bars() -> None:
    made = history(ranks=2)
    made.events = [make_event("started", details={"hosts": ["ip-10-0-0-1.compute.internal", "w" * 2000]})]
    ticks = memory_figure(made)["layout"]["xaxis"]["ticktext"]
    assert ticks == ["rank 0<br>ip-10-0-0-1.…te.internal", " ", f"rank 1<br>{'w' * 12}…{'w' * 11}"]


def test_ranks_that_have_left_hold_nothing() -> None:
    records = {rank: [make_record(step, rank) for step in (1, 2)] for rank in range(4)}
    left = make_event("reshaped", 2, details={"after": {"pp": 1, "dp": 2, "tp": 1}})
    grown = make_event("reshaped", 2, details={"after": {"pp": 2, "dp": 2, "tp": 1}})
    assert History.of(records, [left]).ranks == [0, 1]
    assert History.of(records, [left, grown]).ranks == [0, 1, 2, 3]
    assert History.of(records, [make_event("reshaped", 1, details={"zero": 3})]).ranks == [0, 1, 2, 3]


def test_records_that_go_back_while_they_are_read_are_no_error():
    class Shrinking(list):
        """Another thread polls between two questions."""

        def __getitem__(self, index):
            found = super().__getitem__(index)
            del self[50:]
            return found

    whole = History.of({0: [make_record(step) for step in range(1, 101)]})
    whole.update({0: Shrinking(make_record(step) for step in range(1, 121))}, ())
    assert whole.lead.length >= 50
