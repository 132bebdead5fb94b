"""Random sequences of calls to an engine give what a plain loop gives, after each call: see `ranks.sequences`.

A sequence that fails is printed, shrunk, as the Python that makes it: it can be put into test_exact_state as it is.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ranks.conftest import PoolOf
from ranks.pool import Pool
from ranks.probe import OPTIMIZERS, probe, side_probe
from ranks.sequences import Call, Sequence, carry_out

CALLS = 20

numbers = st.integers(0, 63)
"""Of micro-batches: bits 0 to 3 say which rank uses which branch."""

places = st.sampled_from(["forward", "backward"])

anywhere = st.sampled_from(["none", "host", "disk"])
"""Where optimizer states, and parameters, lie after a change."""

KINDS: dict[int, st.SearchStrategy[Call]] = {
    1: st.just(Call("nothing")),  # What a call that does not matter shrinks to.
    10: st.builds(Call, st.just("forward"), numbers),
    14: st.builds(Call, st.just("backward"), numbers, st.sampled_from([None, None, "no_sync"])),
    26: st.builds(Call, st.just("step"), numbers),
    40: st.builds(Call, st.just("micro_batch"), numbers, st.sampled_from([None, None, "no_sync"])),
    48: st.builds(Call, st.just("train_batch"), numbers, st.sampled_from([None, None, -1, 1])),
    60: st.builds(Call, st.just("look"), numbers, st.sampled_from(["no_grad", "inference_mode", "gradients"])),
    62: st.builds(Call, st.just("step_other"), numbers),
    65: st.builds(Call, st.just("evaluate"), numbers),
    68: st.builds(Call, st.just("gather")),
    73: st.builds(Call, st.just("fail"), numbers, st.tuples(places, st.none(), st.booleans())),
    76: st.builds(Call, st.just("fail"), numbers, st.tuples(places, st.integers(0, 1), st.booleans())),
    86: st.builds(Call, st.just("reshape"), st.integers(0, 3), st.tuples(anywhere, anywhere)),
    94: st.builds(Call, st.just("save")),
    99: st.builds(Call, st.just("load"), st.integers(0, 5)),
}
"""Up to which of 100 numbers → what call it stands for: the frequencies."""

calls = st.integers(0, 99).flatmap(lambda n: next(kind for limit, kind in KINDS.items() if n <= limit))

sequences = st.builds(
    Sequence,
    stage=st.integers(0, 3),
    accumulation=st.integers(1, 3),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    instance=st.booleans(),
    clip_norm=st.sampled_from([None, 0.3]),
    optimizer_at=anywhere,
    other=st.booleans(),
    build=st.sampled_from([probe, side_probe]),
    calls=st.lists(calls, min_size=CALLS, max_size=CALLS),
)


def check(ranks: Pool, examples: int, seconds: float = 30.0) -> None:
    """So many sequences, the same ones every time, on these ranks."""

    @settings(
        max_examples=examples, database=None, report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(sequences)
    def run(sequence: Sequence) -> None:
        with tempfile.TemporaryDirectory(prefix="speedlab-sequence-") as folder:
            wrong = ranks.run(carry_out, sequence, Path(folder), timeout=seconds)
        assert wrong == [[]] * ranks.size, "\n".join(line for lines in wrong for line in lines)

    with tempfile.TemporaryDirectory(prefix="speedlab-sequence-") as folder:
        ranks.run(carry_out, Sequence(calls=[]), Path(folder), timeout=180)  # Kernels may have to be compiled first.
    try:
        run()
    finally:
        ranks.new_group()  # Ranks that met anew did so in a folder of their sequence, which is gone.


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [1, 2])
def test_sequences_of_calls(pool_of: PoolOf, size: int) -> None:
    check(pool_of(size), 40 // size)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("size", "backend", "examples"), [(1, "shared", 500), (2, "shared", 500), (2, "gloo", 100)])
def test_many_sequences_of_calls(pool_of: PoolOf, size: int, backend: str, examples: int) -> None:
    check(pool_of(size, backend), examples)
