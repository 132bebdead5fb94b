"""Folding of equal lines, with a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from speedlab.cluster.output_folding import FOLD_SECONDS, MOST_LINES, PARTIAL_SECONDS, LineFolder


def test_the_same_line_of_all_ranks_is_one_and_comes_at_once() -> None:
    folder = LineFolder(range(4))
    for rank in (2, 0, 3):
        folder.feed(rank, "stdout", "hello\n", 0.0)
    assert folder.drain(0.1) == []
    folder.feed(1, "stdout", "hello\n", 0.1)
    assert folder.drain(0.1) == [([0, 1, 2, 3], "stdout", "hello\n")]
    assert not folder.waiting


def test_a_line_of_some_ranks_waits_no_longer_than_the_fold() -> None:
    folder = LineFolder(range(4))
    folder.feed(1, "stderr", "warning\n", 0.0)
    folder.feed(3, "stderr", "warning\n", 0.1)
    assert folder.drain(FOLD_SECONDS - 0.01) == []
    assert folder.drain(FOLD_SECONDS) == [([1, 3], "stderr", "warning\n")]


def test_streams_are_not_mixed() -> None:
    folder = LineFolder(range(2))
    folder.feed(0, "stdout", "x\n", 0.0)
    folder.feed(1, "stderr", "x\n", 0.0)
    assert folder.drain(1.0) == [([0], "stdout", "x\n"), ([1], "stderr", "x\n")]


def test_a_line_more_on_one_rank_does_not_spoil_the_folding() -> None:
    folder = LineFolder(range(2))
    folder.feed(0, "stdout", "start\nend\n", 0.0)
    folder.feed(1, "stdout", "start\nonly here\nend\n", 0.0)
    assert folder.drain(1.0) == [
        ([0, 1], "stdout", "start\n"),
        ([1], "stdout", "only here\n"),
        ([0, 1], "stdout", "end\n"),
    ]


def test_unfinished_lines_wait_for_their_end() -> None:
    folder = LineFolder(range(1))
    folder.feed(0, "stdout", "half", 0.0)
    assert folder.drain(0.5) == []
    folder.feed(0, "stdout", " whole\n", 0.6)
    assert folder.drain(0.6) == [([0], "stdout", "half whole\n")]
    folder.feed(0, "stdout", "prompt> ", 1.0)
    assert folder.drain(1.0 + PARTIAL_SECONDS) == [([0], "stdout", "prompt> ")]


def test_progress_bars_and_windows_line_ends() -> None:
    folder = LineFolder(range(1))
    folder.feed(0, "stderr", "10 %\r20 %\ra\r\nb\r", 0.0)
    assert folder.drain(0.0) == [([0], "stderr", "10 %\r20 %\ra\r\n")]
    folder.feed(0, "stderr", "\nc\n", 0.1)  # The carriage return belonged to this line feed.
    assert folder.drain(0.1) == [([0], "stderr", "b\r\nc\n")]


def test_floods_are_cut_and_say_so() -> None:
    folder = LineFolder(range(2))
    folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(MOST_LINES + 7)), 0.0)
    out = folder.drain(1.0)
    assert out[0] == ([0], "stderr", "… 7 lines of output left out\n")
    assert out[1][2].startswith("7\n8\n")
    assert out[1][2].count("\n") == MOST_LINES


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["stdout", "stderr"]), st.text("ab\n", max_size=6)), max_size=30
    )
)
def test_nothing_is_lost_and_each_rank_keeps_its_order(writes: list[tuple[int, str, str]]) -> None:
    folder = LineFolder(range(3))
    passed: dict[tuple[int, str], str] = {}
    out = []
    for time, (rank, stream, text) in enumerate(writes):
        folder.feed(rank, stream, text, time * 0.1)
        out += folder.drain(time * 0.1)
    out += folder.drain(len(writes) * 0.1, everything=True)
    for ranks, stream, text in out:
        for rank in ranks:
            passed[rank, stream] = passed.get((rank, stream), "") + text
    written: dict[tuple[int, str], str] = {}
    for rank, stream, text in writes:
        if text:
            written[rank, stream] = written.get((rank, stream), "") + text
    assert passed == written
    assert not folder.waiting
