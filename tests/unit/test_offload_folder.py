"""Where states on disk shall go is looked at before anything starts; while a run is on, only their places change."""

from __future__ import annotations

from pathlib import Path

import pytest

from speedlab.cluster.start_run import check_offload_folder, with_absolute_paths
from speedlab.config import ConfigError, RunConfig
from speedlab.telemetry.current_config import changed_config, shape_of


def on_disk(folder: Path | None) -> RunConfig:
    return RunConfig(zero=3, offload={"optimizer": "disk", "folder": folder})


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload.folder: .*/nowhere is no folder"):
        check_offload_folder(on_disk(tmp_path / "nowhere"))
    check_offload_folder(on_disk(tmp_path))
    check_offload_folder(on_disk(None))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"offload.folder: /proc cannot be written to \(.*\); name another"):
        check_offload_folder(on_disk(Path("/proc")))


def test_engines_find_the_folder_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(on_disk(Path("states"))).offload.folder == tmp_path / "states"


def test_only_places_change_while_a_run_is_on(tmp_path: Path) -> None:
    config = on_disk(tmp_path)
    changed = changed_config(config, 2, offload={"parameters": "host"})
    assert shape_of(changed, 2)["offload"] == {"optimizer": "disk", "parameters": "host"}
    assert changed.offload.folder == tmp_path
    for offload in ({"folder": "/elsewhere"}, {"optimiser": "disk"}, "disk"):
        with pytest.raises(ConfigError, match="while a run is on, it takes a dict of optimizer and parameters"):
            changed_config(config, 2, offload=offload)
