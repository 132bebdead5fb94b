"""RankError: who failed, where, in what words; merged, escaped, the traceback once."""

from __future__ import annotations

import pickle

import pytest

from speedlab.cluster.errors import DIED, INTERRUPTED, RankError, RemoteFailure, name_ranks

TRACE = 'Traceback (most recent call last):\n  File "model.py", line 3, in forward\nRuntimeError: shapes differ\n'
SHAPES = RemoteFailure(kind="RuntimeError", message="shapes differ", traceback=TRACE, step=57, module="blocks.3.mlp")
INTERRUPT = RemoteFailure(kind=INTERRUPTED, message="", traceback="Traceback: long\nKeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([2], "rank 2"), ([0, 1, 2, 3], "ranks 0–3"), ([3, 0, 2], "ranks 0, 2–3"), ([5, 5, 1], "ranks 1, 5")],
)
def test_ranks_are_named_in_spans(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def test_equal_failures_are_one() -> None:
    error = RankError(dict.fromkeys((2, 0, 3, 1), SHAPES))
    assert str(error).splitlines() == [
        "RankError on ranks 0–3 (same on each), step 57, in forward of blocks.3.mlp",
        "  RuntimeError: shapes differ",
        "  The engines are idle and keep their state. Look: %speedlab debug 0, or %%ranks 0 · "
        "more: speedlab guide trouble ranks",
    ]
    assert list(error.by_rank) == [2, 0, 3, 1]


def test_one_rank_is_not_the_same_on_each() -> None:
    first = str(RankError({1: RemoteFailure(kind="ValueError", message="no")})).splitlines()[0]
    assert first == "RankError on rank 1"


def test_ipython_shows_the_traceback_once() -> None:
    lines = RankError({0: SHAPES, 1: SHAPES})._render_traceback_()
    assert "\n".join(lines).count('File "model.py", line 3') == 1
    assert sum("shapes differ" in line for line in lines) == 1
    assert lines[0].startswith("RankError on ranks 0–1")


def test_the_cause_comes_before_what_followed_from_it() -> None:
    error = RankError({0: INTERRUPT, 1: INTERRUPT, 2: SHAPES})
    text = "\n".join(error._render_traceback_())
    assert text.startswith("RankError on rank 2, step 57")
    assert "and on ranks 0–1 (same on each)" in text
    assert "Traceback: long" not in text  # Nobody learns from where a waiting rank was interrupted.
    assert 'File "model.py"' in text
    lost = RemoteFailure(kind="RuntimeError", message="[pair.cc:553] Connection closed by peer [127.0.0.1]:7561")
    assert RankError({0: lost, 3: SHAPES}).groups[0] == ([3], SHAPES)


def test_who_waited_for_ranks_that_were_stopped_has_not_failed() -> None:
    lost = RemoteFailure(kind="PeerLost", message="rank 0 waited for rank 1 in a collective: rank 1 left")
    error = RankError({1: INTERRUPT, 0: lost})
    assert not error.only_interrupted, "its own loss may be why the other was interrupted"
    error.stopped = True
    assert error.only_interrupted
    for cause in (SHAPES, RemoteFailure(kind=DIED, message="gone")):
        error = RankError({1: INTERRUPT, 0: lost, 2: cause})
        error.stopped = True
        assert not error.only_interrupted


def test_different_failures_stay_apart() -> None:
    error = RankError({0: SHAPES, 1: RemoteFailure(kind="RuntimeError", message="shapes differ", step=58)})
    assert [ranks for ranks, _ in error.groups] == [[0], [1]]
    assert "  and on rank 1, step 58" in str(error)


def test_advice_follows_what_happened() -> None:
    died = RankError({1: RemoteFailure(kind=DIED, message="gone"), 0: INTERRUPT})
    assert str(died).splitlines()[-1].endswith("cluster.restart(1)")
    assert str(RankError({0: SHAPES}, "Go back: run.resume(step=50)")).endswith("  Go back: run.resume(step=50)")


def test_html_is_escaped() -> None:
    bad = RemoteFailure(kind="ValueError", message="<script>x</script>", traceback="<b>trace</b>")
    page = RankError({0: bad})._repr_html_()
    assert "<script>" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "&lt;b&gt;trace&lt;/b&gt;" in page


def test_it_survives_pickling_and_plain_data() -> None:
    error = pickle.loads(pickle.dumps(RankError({0: SHAPES, 1: INTERRUPT}, "advice")))
    assert error.by_rank == {0: SHAPES, 1: INTERRUPT}
    assert error.advice == "advice"
    assert RemoteFailure.from_dict(SHAPES.to_dict()) == SHAPES


def test_an_error_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        RankError({})
