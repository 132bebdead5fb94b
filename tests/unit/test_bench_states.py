"""`bench states`: what each kind of states takes, that it trains, and that losses are compared seed by seed."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.states import KINDS, States, _outcomes, _render

BYTES = [14, 8.03125, 10, 10, 4.03125]


@pytest.mark.parametrize(
    ("kind", "expected"), list(zip(KINDS, BYTES, strict=True)), ids=lambda each: getattr(each, "name", "")
)
def test_bytes_a_parameter_and_a_few_steps_downhill(kind, expected) -> None:
    start = torch.full((2560,), 0.3).bfloat16()
    states = States(start.float(), kind, seed=0)
    assert states.bytes_a_parameter == expected
    for _ in range(20):
        states.update(states.param.float(), 1e-2, 1.0)  # The gradient of a parabola.
    assert states.param.dtype is torch.bfloat16
    assert states.param.float().mean() == pytest.approx(0.1, abs=0.03)


def test_losses_are_compared_seed_by_seed() -> None:
    losses = {"large": [1.0, 2.0, 3.0], "small": [1.1, 2.3, 2.9]}
    large, small = _outcomes(losses, {"large": 14.0, "small": 4.03125})
    assert (large.worse, large.worse_range, large.loss_range, large.n) == (0, (0, 0), (1, 3), 3)
    assert small.worse == pytest.approx(0.1)
    assert small.worse_range == (pytest.approx(-0.1), pytest.approx(0.3))
    text = _render([large, small])
    assert text.splitlines()[2].split() == [
        "small",
        "4.03",
        "2.1000",
        "(1.1000..2.9000)",
        "+0.1000",
        "(-0.1000..+0.3000)",
    ]
    assert text.endswith("of 3 seeds; between seeds the first one's loss differs by 2.0000")
