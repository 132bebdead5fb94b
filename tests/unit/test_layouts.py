"""Which layouts of a run exist, and what is said of those that do not."""

from __future__ import annotations

import itertools
import re

import pytest

from speedlab.config import RunConfig, layout_rules
from speedlab.layout import Layout, LayoutError

TINY = RunConfig()  # 6 blocks, 6 heads, sequences of 256 tokens


def test_dp_follows() -> None:
    assert RunConfig(parallel={"tp": 2}).layout(8) == Layout(pp=1, dp=4, tp=2)
    assert RunConfig(parallel={"pp": 2, "tp": 2}).layout(4) == Layout(pp=2, dp=1, tp=2)


def test_possible_layouts_are_all_there_are() -> None:
    found = layout_rules.possible(TINY, 4)
    assert [(x.pp, x.dp, x.tp) for x in found] == [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)]
    for engines in range(1, 25):
        for layout in layout_rules.possible(TINY, engines):
            assert layout.world_size == engines
            assert layout.tp in (1, 2, 3, 6)
            assert layout.pp <= 6


def test_the_batch_equation_counts() -> None:
    config = TINY.replace(batch={"global_size": 6, "micro_size": 3})
    assert [(x.pp, x.dp, x.tp) for x in layout_rules.possible(config, 4)] == [
        (2, 2, 1),
        (4, 1, 1),
        (1, 2, 2),
        (2, 1, 2),
    ]
    assert "no whole solution" in (layout_rules.why_not(config, 4, pp=1) or "")


def test_uneven_pipeline_of_the_announcement() -> None:
    """298 layers on 50 pipeline stages."""
    config = RunConfig(model={"layers": 298, "hidden": 64, "heads": 4}, parallel={"pp": 50})
    assert config.layout(50).pp == 50
    cut = (5, *(6,) * 48, 5)
    assert sum(cut) == 298
    assert config.replace(parallel={"cut": cut}).layout(50).pp == 50


@pytest.mark.parametrize(
    ("change", "engines", "said"),
    [
        ({"dp": 3}, 4, r"pp 1 × dp 3 × tp 1 = 3 ranks, but there are 4 engines; dp 4 would fit; on 4 engines pp 1"),
        (
            {"tp": 3},
            4,
            r"4 ranks do not divide by pp 1 × tp 3 = 3; on 4 engines pp 1 × dp 2 × tp 2 .* works on 3 engines$",
        ),
        ({"tp": 4}, 6, r"6 ranks do not divide by pp 1 × tp 4 = 4; on 6 engines pp 1 × dp 1 × tp 6 or .* would work$"),
        (
            {"dp": 3},
            7,
            r"there are 7 engines; dp 7 would fit; on 7 engines .* as it is asked for it works on 3 engines$",
        ),
        ({"tp": 4}, 4, r"tp 4: 6 heads do not divide by 4; 1, 2, 3 and 6 do; on 4 engines pp 1 × dp 2 × tp 2 or"),
        ({"pp": 8}, 8, r"pp 8, but the model has 6 blocks; .*; on 8 engines pp 4 × dp 2 × tp 1 or"),
        (
            {"pp": 4, "schedule": "interleaved"},
            4,
            r"pp 4 × 2 stages a rank = 8 pipeline stages, but the model has 6 blocks",
        ),
        ({"pp": 2, "cut": (1, 2, 3)}, 2, r"need as many numbers in parallel.cut, which has 3"),
        ({"pp": 2, "cut": (1, 4)}, 2, r"parallel.cut 1 \+ 4 = 5 blocks, but the model has 6"),
        ({"pp": 2, "cut": (0, 6)}, 2, r"each pipeline stage needs at least one"),
        ({"tp": 3, "sequence": True}, 3, r"sequences of 256 tokens do not divide by 3; 255 would"),
        (
            {"pp": 2, "schedule": "interleaved", "micro_batches": 5},
            2,
            r"micro-batches in rounds of pp 2: 5 do not divide by 2 rounds; 4 or 6 would",
        ),
    ],
)
def test_what_does_not_exist_is_told_with_its_numbers(change: dict, engines: int, said: str) -> None:
    assert layout_rules.why_not(TINY, engines, **change) is not None
    micro_batches = change.pop("micro_batches", None)
    batch = {"batch": {"accumulation": micro_batches}} if micro_batches else {}
    with pytest.raises(LayoutError, match=said):
        TINY.replace(parallel=change, **batch).layout(engines)


def test_no_layout_is_advised_that_does_not_work() -> None:
    """A batch that only few layouts divide, on every number of engines: what is named is tried."""
    for engines, tp, pp, dp in itertools.product(range(1, 13), range(1, 9), range(1, 5), (None, 2, 3)):
        config = TINY.replace(parallel={"tp": tp, "pp": pp, "dp": dp}, batch={"global_size": 6, "micro_size": 1})
        try:
            config.layout(engines)
        except LayoutError as error:
            text = str(error)
        else:
            continue
        for found in re.findall(r"(?<!: )pp (\d+) × dp (\d+) × tp (\d+)(?= or|,| would)", text):
            axes = dict(zip(("pp", "dp", "tp"), map(int, found), strict=True))
            assert layout_rules.why_not(config, engines, **axes) is None, text
        for found in re.findall(r"; dp (\d+) would fit", text):
            assert layout_rules.why_not(config, engines, dp=int(found)) is None, text
        for found in re.findall(r"works on (\d+) engines", text):
            assert int(found) < engines
            assert layout_rules.why_not(config, int(found), dp=dp) is None, text
        assert "multiple of" not in text.partition("batch:")[0]


def test_fewer_micro_batches_than_stages_are_allowed() -> None:
    assert layout_rules.why_not(TINY, 4, pp=4, micro_batches=2) is None


def test_rules_of_the_built_in_model_do_not_bind_another() -> None:
    assert RunConfig(parallel={"tp": 4}).layout(4, built_in=False) == Layout(tp=4)
