"""A run begins: what can be wrong is looked for, its folder is made, and its cluster takes it up."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedlab.cluster.given_paths import check_offload_folder, with_absolute_paths
from speedlab.cluster.known_runs import refuse_second_run
from speedlab.cluster.own_model import keep, packed_model
from speedlab.cluster.run import Run
from speedlab.cluster.trial import try_own_model
from speedlab.config import RunConfig
from speedlab.telemetry.folder import RunFolder, require_space

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster

_RECORD_BYTES = 1024
_SPARE_BYTES = 64 * 2**20


def start_run(cluster: Cluster, config: RunConfig, **given: Any) -> Run:
    """Start a new run on all ranks of `cluster`; returns when it has begun.

    `given`: `model`, `loss` and `tp_plan`, as far as the user gave them. Everything that can be wrong is looked for
    before the run takes its name: raises ConfigError, LayoutError, RunFolderError or ClusterError.
    """
    from speedlab.data import check

    layout = config.layout(cluster.size, built_in="model" not in given)
    config.batch.resolve(layout.data_size)
    check(config.data)
    check_offload_folder(config)
    refuse_second_run(cluster)
    pids = tuple(status.pid for status in cluster.status())
    require_space(config.folder, _SPARE_BYTES + config.steps * cluster.size * _RECORD_BYTES)
    with packed_model(cluster, given) as packed:
        try_own_model(cluster, config, packed)
        folder = RunFolder.create(with_absolute_paths(config))
        try:
            now = replace(folder.read_status(), cluster=cluster.name, token=cluster.token, rank_pids=pids)
            folder.write_status(now)
            keep(packed, folder.path)
            cluster.runs.begin(folder.path)
        except BaseException:
            if not _has_begun(cluster, folder.path):
                shutil.rmtree(folder.path)  # Nothing has run in it; its name is free again.
            raise
    return Run(folder, cluster)


def _has_begun(cluster: Cluster, folder: Path) -> bool:
    """Whether ranks work on it though an interrupt came before that was told."""
    try:
        return cluster.runs.standing(folder).active
    except Exception:
        return False
