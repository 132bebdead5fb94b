"""What of a rank's states lies away from its device, and the room that their way takes. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from speedlab.config import OffloadConfig
from speedlab.layout import padded_numel
from speedlab.placement import EIGHT_BITS, ITEM_BYTES, MemoryKind, ZeroPolicy
from speedlab.planner.setup import Setup

PAGE_BYTES = 4096
"""Memory for decoded states comes in whole pages."""

_STAGED = 2
"""Flats of each state on disk for which there is room in the host's memory: one is read ahead, or written behind,
while another one is used."""


def zero_policy_of(setup: Setup, device: str = "cpu") -> ZeroPolicy:
    """Who holds which state, and where, on devices of a kind."""
    return ZeroPolicy.of_stage(
        setup.zero_stage,
        setup.layout.replicas,
        optimizer=MemoryKind.of_choice(setup.offload.optimizer),
        parameters=MemoryKind.of_choice(setup.offload.parameters),
        in_backward=setup.optimizer.in_backward,
        delayed=setup.offload.delayed_update is not None,
        device=device,
        quantized_weights=setup.quantized_weights,
        quantized_gradients=setup.quantized_gradients,
        secondary_ranks=setup.secondary_partition or 0,
    )


def state_places(zero_policy: ZeroPolicy) -> dict[str, MemoryKind]:
    """Category of the ledger -> where such states lie between two uses."""
    return {
        "parameters": zero_policy.parameters_at,
        "gradients": zero_policy.gradients_at,
        "master_weights": zero_policy.states_at,
        "optimizer_moments": zero_policy.states_at,
    }


def has_masters(setup: Setup, device: str) -> bool:
    """Whether there are float32 masters beside the parameters: of narrower ones, unless these do without, and of those
    that stay on a GPU while the update is computed on the host."""
    if setup.dtype == "float32":
        return zero_policy_of(setup, device).separate_masters
    return setup.masters == "float32" or setup.dtype != "bfloat16"


def state_widths(setup: Setup, device: str) -> dict[str, float]:
    """Category of the ledger -> bytes of an element between two steps."""
    element = ITEM_BYTES[setup.dtype]
    # Sums of several are taken in float32, and by the optimizer itself.
    summed = ITEM_BYTES["float32"] if setup.accumulation > 1 or setup.optimizer.sums_itself else element
    return {
        "parameters": element,
        "gradients": 0 if setup.optimizer.in_backward else summed,
        "master_weights": ITEM_BYTES["float32"] if has_masters(setup, device) else 0,
        "optimizer_moments": ITEM_BYTES[setup.moments] * setup.optimizer.moments,
    }


def decoded_bytes(setup: Setup, largest: int) -> int:
    """Of float32 memory in which coded states of a flat are decoded, which a rank has `largest` elements of; where the
    update is computed."""
    decoded = setup.optimizer.moments if setup.moments == EIGHT_BITS else 0
    decoded += setup.dtype == "bfloat16" and setup.masters == "none"
    return decoded * padded_numel(4 * largest, PAGE_BYTES)


def decodes_on_host(setup: Setup, device: str) -> bool:
    """Whether that is in the host's memory, beside a GPU's. A CPU's is the host's."""
    return device != "cpu" and zero_policy_of(setup, device).states_at is not MemoryKind.DEVICE


def inputs_away(setup: Setup, device: str) -> bool:
    """Whether inputs of blocks wait on the host. A CPU's memory is the host's, so that there is nothing to move."""
    return device != "cpu" and setup.offload.activations == "host" and setup.checkpointing == "block"


def staging_bytes(setup: Setup, largest: int, widths: Mapping[str, float]) -> int:
    """Of the host's memory, what the way to and from the disk takes. `largest`: elements that a rank has of its largest
    flat; `widths`: category -> bytes of an element."""
    zero_policy = zero_policy_of(setup)
    places = state_places(zero_policy)
    staged = sum(width for state, width in widths.items() if places[state] is MemoryKind.DISK)
    if zero_policy.grads_double_buffered and zero_policy.states_at is MemoryKind.DISK:
        staged += widths["gradients"]
    return round(_STAGED * largest * staged)


def offload_words(offload: OffloadConfig) -> str:
    """'optimizer on disk, parameters on host'; '' where everything stays on the device."""
    states = ("optimizer", "parameters", "activations")
    words = [f"{state} on {place}" for state in states if (place := getattr(offload, state)) != "none"]
    words += [f"updates delayed from step {first}"] if (first := offload.delayed_update) is not None else []
    return ", ".join(words)
