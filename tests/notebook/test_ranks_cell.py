"""`%%ranks` in a real IPython shell, with engines that say what the test says; and what a cell's display shows."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_helpers import wait_for
from IPython.core.error import UsageError
from magics_fakes import FakeCluster, FakeResults, Notebook, cell_is_over, make_run
from speedlab_notebook.magics import ranks_magic
from speedlab_notebook.magics.transcript import MOST_LINES, Transcript

from speedlab.cluster import RankError, RemoteFailure


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", (None, False, False)),
        ("--wait", (None, False, True)),
        ("0,2-3", ([0, 2, 3], False, False)),
        ("3, 0–1 --wait", ([3, 0, 1], False, True)),
        ("1 1 --live", ([1], True, False)),
        ("0 --wait  # it's rank 0", ([0], False, True)),
    ],
)
def test_ranks_are_read(line: str, expected: Any) -> None:
    assert ranks_magic.parse(line) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--wiat", "unknown option '--wiat'; the nearest is '--wait'"),
        ("two", "'two' is neither a rank nor a span of ranks"),
        ("3-1", "the span 3-1 runs backwards; 1-3 is the same ranks"),
        ("-1", "unknown option '-1'"),
        ("0-99999999", "0-99999999 are 100,000,000 ranks; no cluster has so many"),
        ("99999999999", "'99999999999' is neither a rank nor a span of ranks"),
    ],
)
def test_what_is_wrong_in_ranks_is_named(line: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        ranks_magic.parse(line)


def test_a_cell_returns_at_once_and_its_output_comes_into_its_display(notebook: Notebook) -> None:
    cluster, messages = FakeCluster(), notebook.messages
    assert notebook.run("%%ranks\nprint('hello')\n") == ""
    assert cluster.executed == [("print('hello')\n", None)]
    assert cluster.doors == [""]
    first = notebook.display.outputs[0]
    assert first["data"]["text/plain"] == "ranks 0–1 running"

    messages.say(0, "hello\n")
    messages.say(1, "hello\n")
    messages.say(1, "<b>mine</b>\n", "stderr")
    wait_for(lambda: "&lt;b&gt;mine" in notebook.last())
    assert "running" in notebook.last()
    cluster.results.finish()
    messages.idle(0, 1)
    wait_for(cell_is_over)

    text = notebook.last("text/plain").splitlines()
    assert text[:2] == ["ranks 0–1: hello", "rank 1: <b>mine</b>"]
    assert text[2].startswith("ranks 0–1 done in ")
    assert "<b>mine" not in notebook.last()
    updates = notebook.display.outputs[1:]
    assert {output["transient"]["display_id"] for output in updates} == {first["transient"]["display_id"]}
    assert all(output["update"] for output in updates)


def test_a_cell_that_fails_shows_its_rank_error(notebook: Notebook) -> None:
    cluster, messages = FakeCluster(), notebook.messages
    notebook.run("%%ranks 1\n1/0")
    assert cluster.executed == [("1/0\n", [1])]
    cluster.results.finish({1: RemoteFailure(kind="ZeroDivisionError", message="<division>", traceback="line <1>")})
    messages.idle(1)
    wait_for(cell_is_over)
    assert "RankError on rank 1" in notebook.last("text/plain")
    assert "ZeroDivisionError: &lt;division&gt;" in notebook.last()
    assert "line &lt;1&gt;" in notebook.last()
    assert "rank 1 failed after" in notebook.last()


@pytest.mark.parametrize("asks", [True, False], ids=["a person", "a notebook that runs by itself"])
def test_waiting_raises_the_rank_error(notebook: Notebook, asks: bool) -> None:
    cluster, messages = FakeCluster(), notebook.messages
    notebook.shell.kernel = SimpleNamespace(_allow_stdin=asks)
    threading.Thread(target=lambda: (wait_for(lambda: cluster.executed), end())).start()

    def end() -> None:
        messages.say(0, "before\n")
        cluster.results.finish({0: RemoteFailure(kind="ValueError", message="no")})
        messages.idle(0, 1)

    error = notebook.error("%%ranks --wait\nraise ValueError('no')")
    assert isinstance(error, RankError)
    assert error.by_rank[0].message == "no"
    assert "rank 0: before" in notebook.last("text/plain")
    assert "RankError" not in notebook.last()  # It is raised, so it is not shown twice.
    assert (cluster.doors != [""]) is asks  # The ranks were told where somebody can be asked, if so,
    assert list(cluster.directory.glob("debug-*.sock")) == []  # and nobody is any more.


@pytest.mark.parametrize(
    ("code", "says_so"),
    [
        ("breakpoint()", True),
        ("def f(x):\n    breakpoint(header='<here>')\n%time f(1)", True),
        ("await f(breakpoint())", True),
        ("# breakpoint()\nprint('breakpoint()')", False),
        ("!grep 'breakpoint()' *.py", False),
        ("breakpoint(", False),
        ("breakpoint()\0", False),
    ],
)
def test_a_cell_that_says_breakpoint_waits(code: str, says_so: bool) -> None:
    assert ranks_magic.stops(code) is says_so


@pytest.mark.parametrize("code", ["x = [1,", "'''x", "%%bash\necho it's (", "1 +", "1\0"])
def test_code_that_is_not_complete_or_no_python_is_left_to_the_ranks(notebook: Notebook, code: str) -> None:
    cluster = FakeCluster()
    notebook.run(f"%%ranks\n{code}")
    assert cluster.executed == [(f"{code}\n", None)]
    cluster.results.finish()
    notebook.messages.idle(0, 1)
    wait_for(cell_is_over)


def test_an_interrupt_while_waiting_reaches_the_ranks(notebook: Notebook) -> None:
    cluster, messages = FakeCluster(), notebook.messages
    cluster.results = FakeResults([0, 1], messages)
    cell = ranks_magic.RanksCell(
        cluster,  # type: ignore[arg-type]
        cluster.results,  # type: ignore[arg-type]
        ranks_magic.TerminalView("running"),
    )

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    cell.start()
    with pytest.raises(KeyboardInterrupt):
        cell.wait(SimpleNamespace(serve=interrupted))  # type: ignore[arg-type]  # as much of a door as is asked
    assert (cluster.results.interrupts, cluster.interrupts) == (1, 0)  # This cell, and nothing else.
    cluster.results.finish()
    messages.idle(0, 1)
    wait_for(cell_is_over)


def test_a_cell_says_for_which_run_it_waits(notebook: Notebook) -> None:
    cluster, messages = FakeCluster(), notebook.messages
    cluster.engine_states = ["busy", "busy"]
    notebook.run("%%ranks 0\nx")
    assert notebook.last("text/plain") == "rank 0 is busy; this cell runs when it is done"
    cluster.results.finish()
    messages.idle(0)
    wait_for(cell_is_over)

    make_run(cluster, "quick")
    notebook.run("%%ranks\nx")
    assert notebook.last("text/plain") == (
        "run 'quick' is running at step 12 of 200 and keeps the engines busy; this cell runs when it pauses or ends"
    )
    messages.queue.put((0, "status", {"execution_state": "busy"}))
    wait_for(lambda: notebook.last("text/plain") == "ranks 0–1 running")
    cluster.results.finish()
    messages.idle(0, 1)
    wait_for(cell_is_over)


def test_a_cell_ends_when_the_controller_dies(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_magic, "_CHECK_SECONDS", 0.05)
    monkeypatch.setattr(ranks_magic, "LAST_WORDS_SECONDS", 0.05)
    cluster, messages = FakeCluster(), notebook.messages
    notebook.run("%%ranks\nx")
    messages.say(0, "last words\n")
    cluster.controller_died = True
    wait_for(cell_is_over)
    assert "rank 0: last words" in notebook.last("text/plain")
    assert "EngineDied: the controller has died" in notebook.last("text/plain")


def test_ranks_that_do_not_exist_are_refused(notebook: Notebook) -> None:
    FakeCluster()
    error = notebook.error("%%ranks 7\nx")
    assert str(error) == "there is no rank 7; cluster 'default' has ranks 0–1"


def test_in_a_terminal_lines_are_printed_as_they_come(notebook: Notebook) -> None:
    del notebook.shell.kernel
    cluster, messages = FakeCluster(), notebook.messages
    threading.Thread(target=lambda: (wait_for(lambda: cluster.executed), end())).start()

    def end() -> None:
        messages.say(1, "one\ntwo\n")
        cluster.results.finish()
        messages.idle(0, 1)

    lines = notebook.run("%%ranks --wait\nx").splitlines()
    assert lines[:3] == ["ranks 0–1 running", "rank 1: one", "rank 1: two"]
    assert lines[3].startswith("ranks 0–1 done in")
    assert notebook.display.outputs == []


# What is shown of a cell


def stream(text: str, name: str = "stdout") -> dict[str, str]:
    return {"name": name, "text": text}


def bundle(**data: str) -> dict[str, Any]:
    return {"data": {name.replace("_", "/"): value for name, value in data.items()}, "metadata": {}}


def test_displays_keep_their_place_and_are_folded() -> None:
    transcript = Transcript([0, 1])
    for rank in (0, 1):
        transcript.feed(rank, "stream", stream("before"), 0.0)  # The line has no end.
        transcript.feed(rank, "display_data", bundle(text_plain="a plot", text_html="<p>plot</p>"), 0.0)
        transcript.feed(rank, "stream", stream(f"after {rank}\n"), 0.0)
    transcript.drain(1.0)
    assert transcript.text().splitlines() == [
        "ranks 0–1: before",
        "ranks 0–1: a plot",
        "rank 0: after 0",
        "rank 1: after 1",
    ]
    assert transcript.html().count("<p>plot</p>") == 1


def test_the_printed_text_of_a_rich_result_is_left_out() -> None:
    transcript = Transcript([0])
    transcript.feed(0, "stream", stream("x\n"), 0.0)
    transcript.feed(0, "execute_result", bundle(text_plain="a\nb", text_html="<table></table>"), 0.0)
    transcript.feed(0, "stream", stream("a\n"), 0.0)
    transcript.feed(0, "stream", stream("b\nmore\n"), 0.0)
    transcript.feed(0, "execute_result", bundle(text_plain="7"), 0.0)
    transcript.feed(0, "stream", stream("7\n"), 0.0)
    transcript.drain(1.0)
    assert transcript.text() == "rank 0: x\nrank 0: a\nb\nrank 0: more\nrank 0: 7"


def test_a_display_is_updated_in_its_place() -> None:
    transcript = Transcript([0])
    first = {**bundle(text_plain="1 %"), "transient": {"display_id": "d"}}
    transcript.feed(0, "display_data", first, 0.0)
    transcript.feed(0, "stream", stream("line\n"), 0.0)
    transcript.drain(1.0)
    transcript.feed(0, "update_display_data", {**first, "data": {"text/plain": "99 %"}}, 1.0)
    transcript.drain(2.0)
    assert transcript.text() == "rank 0: 99 %\nrank 0: line"


def test_a_rank_clears_what_it_has_said() -> None:
    transcript = Transcript([0, 1])
    for rank in (0, 1):
        transcript.feed(rank, "stream", stream("epoch 1\n"), 0.0)
        transcript.feed(rank, "display_data", bundle(text_plain="a plot"), 0.0)
    transcript.drain(1.0)
    transcript.feed(0, "clear_output", {"wait": False}, 1.0)
    transcript.drain(2.0)
    assert transcript.text() == "rank 1: epoch 1\nrank 1: a plot"
    transcript.feed(1, "clear_output", {"wait": True}, 2.0)
    transcript.drain(3.0)
    assert transcript.text() == "rank 1: epoch 1\nrank 1: a plot"  # Until there is something in its place.
    for rank in (0, 1):
        transcript.feed(rank, "stream", stream("epoch 2\n"), 3.0)
    assert transcript.drain(4.0) == [([0, 1], "epoch 2\n")]
    assert transcript.text() == "ranks 0–1: epoch 2"
    # One after the other, as in a loop that prints where it is, with and without an end of the line.
    for end in ("\n", ""):
        for epoch in range(3, 6):
            for rank in (0, 1):
                transcript.feed(rank, "clear_output", {"wait": True}, 4.0)
                transcript.feed(rank, "stream", stream(f"epoch {epoch}{end}"), 4.0)
        transcript.drain(5.0, everything=True)
        assert transcript.text() == "ranks 0–1: epoch 5"


def test_a_carriage_return_overwrites_its_line() -> None:
    transcript = Transcript([0])
    transcript.feed(0, "stream", stream("10 %\r50 %\r100 %\nend\r\nnext\n", "stderr"), 0.0)
    transcript.drain(1.0)
    assert transcript.text() == "rank 0: 100 %\nrank 0: end\nrank 0: next"


def test_pictures_and_text_become_safe_html() -> None:
    transcript = Transcript([0])
    transcript.feed(0, "display_data", bundle(text_plain='<"x">', image_png="iVBO\nRw0=\n"), 0.0)
    transcript.feed(0, "display_data", {"data": {"image/svg+xml": "<svg onload='x'/>"}, "metadata": {}}, 0.0)
    transcript.feed(0, "display_data", bundle(text_plain="<script>"), 0.0)
    transcript.feed(0, "stream", stream("\x1b[31mred\x1b[0m <i>\n"), 0.0)
    transcript.drain(1.0)
    page = transcript.html()
    assert '<img alt="&lt;&quot;x&quot;&gt;" src="data:image/png;base64,iVBORw0=">' in page
    assert "onload" not in page
    assert "data:image/svg+xml;base64,PHN2Zy" in page
    assert "<script>" not in page
    assert "red &lt;i&gt;" in page
    assert "\x1b" not in page


def test_the_oldest_lines_are_left_out() -> None:
    transcript = Transcript([0])
    for start in range(0, MOST_LINES + 500, 500):
        transcript.feed(0, "stream", stream("".join(f"{number}\n" for number in range(start, start + 500))), 0.0)
        transcript.drain(1.0)
    lines = transcript.text().splitlines()
    assert lines[0] == "… 500 lines left out"
    assert (lines[1], lines[-1], len(lines)) == ("rank 0: 500", "rank 0: 1499", MOST_LINES + 1)
