"""What the first rank hears of its mailbox."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from telemetry_samples import make_folder

from speedlab.trainer.reporting import Reporter


def test_a_mailbox_that_cannot_be_read_is_told_of_once_and_heard_again_later(tmp_path):
    folder = make_folder(tmp_path)
    training: Any = SimpleNamespace(
        folder=folder, world=SimpleNamespace(rank=0), engine=SimpleNamespace(global_step=3), config=folder.config
    )
    reporter = Reporter(training)
    control = folder.path / "control"
    control.rename(folder.path / "away")
    control.write_text("")
    assert [reporter.waiting() for _ in range(3)] == [[]] * 3
    control.unlink()
    (folder.path / "away").rename(control)
    folder.post("pause")
    assert [command.word for command in reporter.waiting()] == ["pause"]
    reporter.open()
    reporter.close()
    reported = [(event.kind, event.text) for event in folder.read_events()]
    assert [kind for kind, _ in reported] == ["warning"]
    assert "cannot be read" in reported[0][1]
    assert "the run goes on" in reported[0][1]
