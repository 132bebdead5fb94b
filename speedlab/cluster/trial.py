"""Trying a run's own model before the run has a name: whether it can be trained, and whether it fits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.remote as remote
from speedlab.cluster.errors import ClusterError, RankError
from speedlab.config import ConfigError, RunConfig
from speedlab.display.formatting import bytes_text
from speedlab.hardware import memory_bytes
from speedlab.planner import parameters_by_rank, rank_states

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster


def try_own_model(cluster: Cluster, config: RunConfig, path: Path | None) -> None:
    """Let the first rank try the model on one micro-batch, and see that it fits. Waits for the rank.

    Raises ConfigError for what cannot be trained; warns when it could not be tried.
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
    """Raise ConfigError when its states alone are more than a device holds, or whole copies more than the host."""
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
