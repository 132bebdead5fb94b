"""What of a rank's states lies away from its device, and the room that their way takes. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from speedlab.config import OffloadConfig
from speedlab.placement import Residency, Where
from speedlab.planner.setup import Setup

_STAGED = 2
"""Flats of each state on disk for which there is room in the host's memory: one is read ahead, or written behind,
while another one is used."""


def residency_of(setup: Setup, device: str = "cpu") -> Residency:
    """Who holds which state, and where, on devices of a kind."""
    return Residency.of_stage(
        setup.zero_stage,
        setup.layout.dp,
        optimizer=Where.of_choice(setup.offload.optimizer),
        parameters=Where.of_choice(setup.offload.parameters),
        device=device,
    )


def state_places(residency: Residency) -> dict[str, Where]:
    """Category of the ledger -> where such states lie between two uses."""
    return {
        "parameters": residency.parameters_at,
        "gradients": residency.gradients_at,
        "master_weights": residency.states_at,
        "optimizer_moments": residency.states_at,
    }


def has_masters(setup: Setup, device: str) -> bool:
    """Whether there are float32 masters beside the parameters: of narrower ones, and of those that stay on a GPU while
    the update is computed on the host."""
    return setup.dtype != "float32" or residency_of(setup, device).separate_masters


def inputs_away(setup: Setup, device: str) -> bool:
    """Whether inputs of blocks wait on the host. A CPU's memory is the host's, so that there is nothing to move."""
    return device != "cpu" and setup.offload.activations == "host" and setup.checkpointing == "block"


def staging_bytes(setup: Setup, largest: int, widths: Mapping[str, int]) -> int:
    """Of the host's memory, what the way to and from the disk takes. `largest`: elements that a rank has of its largest
    flat; `widths`: category -> bytes of an element."""
    places = state_places(residency_of(setup))
    return sum(_STAGED * largest * width for state, width in widths.items() if places[state] is Where.DISK)


def offload_words(offload: OffloadConfig) -> str:
    """'optimizer on disk, parameters on host'; '' where everything stays on the device."""
    states = ("optimizer", "parameters", "activations")
    return ", ".join(f"{state} on {place}" for state in states if (place := getattr(offload, state)) != "none")
