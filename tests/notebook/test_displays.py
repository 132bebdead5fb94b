"""How SpeedLab's objects look in a cell."""

from __future__ import annotations

from typing import Any

import pytest
from magics_fakes import DEVICE, RECORD, FakeCluster, Notebook

from speedlab.cluster import RankError, RemoteFailure
from speedlab.config import RunConfig
from speedlab.telemetry.records import Event, RunState


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            RECORD,
            "<step 1,234 rank 1: loss 5.9100 (held-out 6.0200), 41.2 k tokens/s, 1 s, stage 2, 1.5 GiB>",
        ),
        (RECORD.ledger, "Ledger 1.5 GiB of 16.0 GiB: parameters 1.0 GiB"),
        (Event(kind="reshaped", step=7, time=0.0, text="stage 2 → 3"), "<reshaped at step 7: stage 2 → 3>"),
        (DEVICE, "<cpu 'cpu <0>': 1.0 GiB of 4.0 GiB free, fast float32>"),
        (RunState.PAUSED, "paused"),
        (FakeCluster().status()[1], "<rank 1 on cpu <0>: idle, 256 MiB, process 101>"),
    ],
)
def test_objects_are_short_in_a_cell(notebook: Notebook, value: Any, text: str) -> None:
    shown, _ = notebook.shell.display_formatter.format(value)
    assert shown["text/plain"] == text
    listed, _ = notebook.shell.display_formatter.format([value])
    assert listed["text/plain"] == f"[{text}]"


def test_a_configuration_is_a_table(notebook: Notebook) -> None:
    config = RunConfig(name="a", zero=3, data={"source": ("<x>", "y")})
    shown, _ = notebook.shell.display_formatter.format(config)
    lines = shown["text/plain"].splitlines()
    assert lines[0] == "RunConfig (* differs from the default)"
    assert lines[1].split()[:3] == ["run", "name", "a*"]
    assert any(line.split()[:3] == ["zero", "stage", "3*"] for line in lines)
    assert max(map(len, lines)) < 160
    page = shown["text/html"]
    assert "<b title=" in page
    assert "source &lt;x&gt;, y" in page
    assert "<x>" not in page
    description = type(config.zero).model_fields["stage"].description
    assert description is not None
    assert description.split(";")[0] in page


def test_no_repr_in_a_cell_is_long(notebook: Notebook) -> None:
    error = RankError({0: RemoteFailure(kind="ValueError", message="no")})
    assert repr(error) == "<RankError on rank 0: ValueError: no>"
    html = notebook.shell.display_formatter.format(RECORD.ledger)[0]["text/html"]
    assert html.count("<tr>") == 11
    assert "parameters" in html
