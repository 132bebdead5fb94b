"""Start a run: check the configuration, try the model, make the run folder, and submit the run."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.worker.remote as remote
from speedlab.cluster.errors import ClusterError, RankError
from speedlab.cluster.files.user_model import keep, packed_model
from speedlab.cluster.known_runs import refuse_second_run
from speedlab.cluster.run import Run
from speedlab.config import ConfigError, RunConfig
from speedlab.display.formatting import bytes_text
from speedlab.hardware import memory_bytes
from speedlab.planner import parameters_by_rank, rank_states
from speedlab.telemetry.run_folder import RunFolder, require_space

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster


def check_offload_folder(config: RunConfig) -> None:
    """Check the folder to which states are to be offloaded on this host.

    Args:
        config: Configuration of the run.

    Raises:
        ConfigError: If the folder does not exist or cannot be written.
    """
    folder = config.offload.folder
    if folder is None or "disk" not in (config.offload.optimizer, config.offload.parameters):
        return
    if not folder.is_dir():
        raise ConfigError(f"offload.folder: {folder} is no folder; make it on the disk that shall hold the states")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"offload.folder: {folder} cannot be written to ({error.strerror}); name another") from None


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make the paths of data and offloaded states absolute, because engines may run in another directory.

    Args:
        config: Configuration of the run.

    Returns:
        A new configuration.
    """
    sources = config.data.source if isinstance(config.data.source, tuple) else (config.data.source,)
    absolute = tuple(
        source if source == "stdlib" or source.startswith("task:") else _absolute(source) for source in sources
    )
    tokenizer = config.data.tokenizer
    if tokenizer not in ("bpe", "bytes"):
        tokenizer = _absolute(tokenizer)
    source = absolute if isinstance(config.data.source, tuple) else absolute[0]
    offload = {} if config.offload.folder is None else {"folder": _absolute(str(config.offload.folder))}
    return config.replace(data={"source": source, "tokenizer": tokenizer}, offload=offload)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def try_own_model(cluster: Cluster, config: RunConfig, path: Path | None) -> None:
    """Let rank 0 try the model with one micro-batch without values, and check that it fits. Waits for the rank.

    Warns if the model could not be tried.

    Args:
        cluster: Cluster that will train.
        config: Configuration of the run.
        path: File of the model; None for the built-in one.

    Raises:
        ConfigError: If the model cannot be trained or does not fit.
    """
    if path is None:
        return
    try:
        (found,) = cluster.submit(remote.try_model, config.to_json(), str(path), ranks=[0]).result()
    except RankError as error:
        (failure,) = error.by_rank.values()
        if failure.kind in (ConfigError.__name__, ClusterError.__name__, "LayoutError"):
            raise ConfigError(failure.message) from None
        raise
    _refuse_what_does_not_fit(cluster, config, found)
    if found["untried"]:
        warnings.warn(
            f"the model could not be tried before the run, without values ({found['untried']}); its first step will "
            f"tell whether it can be trained",
            stacklevel=4,
        )


def _refuse_what_does_not_fit(cluster: Cluster, config: RunConfig, found: Mapping[str, Any]) -> None:
    """Raise ConfigError if the model states exceed a device, or whole copies of the model exceed the host."""
    layout, parameters, nbytes = config.layout(cluster.size, built_in=False), found["parameters"], found["nbytes"]
    counts = parameters_by_rank(config, layout, whole=parameters)
    states = rank_states(config, layout, counts, stage=config.zero.stage, dtype=found["dtype"])
    for device, state in zip(cluster.devices, states, strict=True):
        needed = state.parameters + state.gradients + state.master_weights + state.optimizer_moments
        if needed > device.capacity_bytes:
            raise ConfigError(
                f"model: with {layout} at ZeRO stage {config.zero.stage}, its {parameters:,} parameters make "
                f"{bytes_text(needed)} of model states on {device.name}, which has "
                f"{bytes_text(device.capacity_bytes)}; use a higher stage, more engines or a smaller model"
            )
    free = memory_bytes()[1]
    if nbytes * cluster.size > free:
        raise ConfigError(
            f"model: each of {cluster.size} ranks makes the whole model before it keeps its part: {bytes_text(nbytes)} "
            f"each, and {bytes_text(free)} are free; make it under torch.device('meta'), in a function: it then gets "
            f"its values part by part"
        )


_RECORD_BYTES = 1024
_SPARE_BYTES = 64 * 2**20


def start_run(cluster: Cluster, config: RunConfig, **given: Any) -> Run:
    """Start a new run on all ranks; return after it was submitted.

    1. Check layout, batch, data and paths.
    2. Try a model of the user.
    3. Make the run folder, which takes the name of the run.
    4. Submit the run. If that fails, remove the folder.

    Args:
        cluster: Cluster that trains.
        config: Configuration of the run.
        **given: `model`, `loss` and `tp_plan`, if the user gave them.

    Raises:
        ConfigError: If the configuration or the model is not valid.
        LayoutError: If the layout does not fit the engines.
        RunFolderError: If the folder cannot be made.
        ClusterError: If another run is active, or an engine is dead.
    """
    from speedlab.data import check

    layout = config.layout(cluster.size, built_in="model" not in given)
    config.batch.resolve(layout.data_size)
    check(config.data)
    check_offload_folder(config)
    refuse_second_run(cluster)
    pids = tuple(status.pid for status in cluster.status())
    # Require room for the records of all steps, so that the run does not end on a full disk.
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
                shutil.rmtree(folder.path)  # No rank has used the folder, so the name can be used again.
            raise
    return Run(folder, cluster)


def _has_begun(cluster: Cluster, folder: Path) -> bool:
    """Return whether ranks work on the run, although an interrupt hid the answer."""
    try:
        return cluster.runs.standing(folder).active
    except Exception:
        return False
