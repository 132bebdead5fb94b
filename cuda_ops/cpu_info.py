"""Features of this machine's processor, for choices between kernels. Cached: every process gets the same answers."""

from __future__ import annotations

from functools import cache

from llvmlite import binding


@cache
def has_avx512() -> bool:
    """Return whether the processor is an x86 with AVX-512."""
    return bool(binding.get_host_cpu_features().get("avx512f", False))


@cache
def has_matrix_units() -> bool:
    """Return whether the processor multiplies tiles of bfloat16 (AMX)."""
    return bool(binding.get_host_cpu_features().get("amx-bf16", False))


@cache
def is_amd() -> bool:
    """Return whether the processor is an AMD of 2017 or later."""
    return binding.get_host_cpu_name().startswith("znver")
