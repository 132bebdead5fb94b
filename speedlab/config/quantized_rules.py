"""Which runs can send integers in the place of parameters and gradients, and partition parameters twice. The planner
asks as much as RunConfig does."""

from __future__ import annotations

from collections.abc import Sequence

from speedlab.config.parts import OffloadConfig, ZeroConfig
from speedlab.config.updates import OptimizerConfig


def quantized_problems(
    zero: ZeroConfig, optimizer: OptimizerConfig, *, offload: OffloadConfig, masters: str
) -> list[str]:
    """What stands against ZeRO++'s switches: the rule, the values, what to change; empty when nothing does. `masters`:
    of the precision."""
    stays = zero.quantized_weights and zero.stage in (1, 2)
    problems = {
        "zero.quantized_weights true needs zero.stage 1, 2 or 3, and it is 0, under which parameters never travel; set "
        "zero.stage to 2, or zero.quantized_weights to false": zero.quantized_weights and zero.stage == 0,
        "zero.quantized_gradients true needs zero.stage 1, 2 or 3, and it is 0, under which no rank owns the sum of a "
        "part; set zero.stage to 2, or zero.quantized_gradients to false": (
            zero.quantized_gradients and zero.stage == 0
        ),
        f"zero.secondary_partition {zero.secondary_partition} needs zero.stage 3, and it is {zero.stage}, under which "
        "every rank holds all parameters; set zero.stage to 3, or zero.secondary_partition to null": (
            zero.secondary_partition is not None and zero.stage != 3
        ),
        f"zero.secondary_partition {zero.secondary_partition} holds parameters on the device, and offload.parameters "
        f"is {offload.parameters!r}; set offload.parameters to 'none', or zero.secondary_partition to null": (
            zero.secondary_partition is not None and offload.parameters != "none"
        ),
        f"zero.quantized_weights true at zero.stage {zero.stage} makes parameters of their masters after each update, "
        f"on the device, and offload.optimizer is {offload.optimizer!r}; set zero.stage to 3, or offload.optimizer to "
        "'none'": stays and offload.optimizer != "none",
        f"zero.quantized_weights true at zero.stage {zero.stage} leaves parameters rounded to integers on every rank, "
        f"and precision.masters is {masters!r}, so that nothing else would hold their values; set zero.stage to 3, or "
        "precision.masters to 'float32'": stays and masters == "none",
        f"optimizer.name {optimizer.name!r} exchanges signs itself, and zero.quantized_weights or "
        "zero.quantized_gradients asks for integers; set both to false, or optimizer.name to 'adamw'": (
            optimizer.sums_itself and (zero.quantized_weights or zero.quantized_gradients)
        ),
    }
    return [problem for problem, is_one in problems.items() if is_one]


def unequal_problem(counts: Sequence[int]) -> str | None:
    """What stands against hosts with so many data-parallel ranks each."""
    if len(set(counts)) == 1:
        return None
    return (
        f"zero.quantized_gradients, zero.secondary_partition: the data-parallel ranks lie on hosts of "
        f"{' and '.join(map(str, counts))}, and each is paired with one on every other host; put {min(counts)} on each "
        "host, or set both to their defaults"
    )


def secondary_problem(size: int | None, on_host: int) -> str | None:
    """What stands against a secondary partition of `size` ranks where a host has so many data-parallel ones."""
    if size is None or on_host % size == 0:
        return None
    nearest = max(divisor for divisor in range(1, min(size, on_host) + 1) if on_host % divisor == 0)
    return (
        f"zero.secondary_partition {size} does not divide the {on_host} data-parallel ranks of a host, outside of "
        f"which it would send parameters; set it to {nearest}, or to null"
    )
