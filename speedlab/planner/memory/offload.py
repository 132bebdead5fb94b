"""Predict which states are offloaded, and the memory of their staging buffers. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from speedlab.config import OffloadConfig
from speedlab.layout import padded_numel
from speedlab.placement import EIGHT_BITS, ITEM_BYTES, MemoryKind, ZeroPolicy
from speedlab.planner.setup import Setup

PAGE_BYTES = 4096
"""Memory for decoded states is allocated in whole pages."""

_STAGED = 2
"""Number of staging buffers in host memory for each state on disk.

One flat is read ahead, or written back, while another one is used.
"""


def zero_policy_of(setup: Setup, device: str = "cpu") -> ZeroPolicy:
    """Return the ZeRO policy of a set-up: which ranks hold which state, and in which memory.

    Args:
        setup: the training.
        device: "cpu" or "cuda".
    """
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
    """Return where states are stored between two uses.

    Args:
        zero_policy: the policy of a set-up.

    Returns:
        Ledger category -> memory.
    """
    return {
        "parameters": zero_policy.parameters_at,
        "gradients": zero_policy.gradients_at,
        "master_weights": zero_policy.states_at,
        "optimizer_moments": zero_policy.states_at,
    }


def has_masters(setup: Setup, device: str) -> bool:
    """Return whether separate float32 master weights exist.

    They exist for narrower parameters (unless updates are rounded stochastically), and for parameters that stay on a
    GPU while the host computes the update.

    Args:
        setup: the training.
        device: "cpu" or "cuda".
    """
    if setup.dtype == "float32":
        return zero_policy_of(setup, device).separate_masters
    return setup.masters == "float32" or setup.dtype != "bfloat16"


def state_widths(setup: Setup, device: str) -> dict[str, float]:
    """Return ledger category -> bytes of an element between two steps.

    Args:
        setup: the training.
        device: "cpu" or "cuda".
    """
    element = ITEM_BYTES[setup.dtype]
    # Several micro-batches are summed in float32; so are gradients that the optimizer sums itself.
    summed = ITEM_BYTES["float32"] if setup.accumulation > 1 or setup.optimizer.sums_itself else element
    return {
        "parameters": element,
        "gradients": 0 if setup.optimizer.in_backward else summed,
        "master_weights": ITEM_BYTES["float32"] if has_masters(setup, device) else 0,
        "optimizer_moments": ITEM_BYTES[setup.moments] * setup.optimizer.moments,
    }


def decoded_bytes(setup: Setup, largest: int) -> int:
    """Return the bytes of float32 buffers for decoded states of one flat, where the update runs.

    Args:
        setup: the training.
        largest: elements of the rank's share of its largest flat.
    """
    decoded = setup.optimizer.moments if setup.moments == EIGHT_BITS else 0
    decoded += setup.dtype == "bfloat16" and setup.masters == "none"
    return decoded * padded_numel(4 * largest, PAGE_BYTES)


def decodes_on_host(setup: Setup, device: str) -> bool:
    """Return whether 8-bit or rounded states are decoded in host memory.

    Args:
        setup: the training.
        device: "cpu" or "cuda"; on a CPU both memories are the same.
    """
    return device != "cpu" and zero_policy_of(setup, device).states_at is not MemoryKind.DEVICE


def inputs_away(setup: Setup, device: str) -> bool:
    """Return whether inputs of blocks are offloaded to the host; never on a CPU, where both memories are the same.

    Args:
        setup: the training.
        device: "cpu" or "cuda".
    """
    return device != "cpu" and setup.offload.activations == "host" and setup.checkpointing == "block"


def staging_bytes(setup: Setup, largest: int, widths: Mapping[str, float]) -> int:
    """Return the bytes of host memory for staging to and from disk.

    Args:
        setup: the training.
        largest: elements of the rank's share of its largest flat.
        widths: ledger category -> bytes of an element.
    """
    zero_policy = zero_policy_of(setup)
    places = state_places(zero_policy)
    staged = sum(width for state, width in widths.items() if places[state] is MemoryKind.DISK)
    if zero_policy.grads_double_buffered and zero_policy.states_at is MemoryKind.DISK:
        staged += widths["gradients"]
    return round(_STAGED * largest * staged)


def offload_words(offload: OffloadConfig) -> str:
    """Return the offload as text, for instance 'optimizer on disk, parameters on host'; empty without offload."""
    states = ("optimizer", "parameters", "activations")
    words = [f"{state} on {place}" for state in states if (place := getattr(offload, state)) != "none"]
    words += [f"updates delayed from step {first}"] if (first := offload.delayed_update) is not None else []
    return ", ".join(words)
