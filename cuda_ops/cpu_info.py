"""What the processor of this machine is, for choices between kernels that are made once: the same for every process."""

from __future__ import annotations

from functools import cache

from llvmlite import binding


@cache
def has_avx512() -> bool:
    """Whether it is an x86 with AVX-512."""
    return bool(binding.get_host_cpu_features().get("avx512f", False))


@cache
def has_matrix_units() -> bool:
    """Whether it multiplies tiles of bfloat16 (AMX)."""
    return bool(binding.get_host_cpu_features().get("amx-bf16", False))


@cache
def is_amd() -> bool:
    """Whether it is one of AMD's since 2017."""
    return binding.get_host_cpu_name().startswith("znver")
