"""Every CUDA kernel becomes machine code for sm_80 and sm_90, without float64 and without spills. Needs no GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_launches import LAUNCHES

from cuda_ops import gpu
from cuda_ops.tensor_checks import array

if not gpu.available():
    pytest.skip("numba-cuda is not installed", allow_module_level=True)

from cuda.bindings import nvjitlink
from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
from numba import cuda, typeof
from numba.cuda import dispatcher

try:
    load_nvidia_dynamic_lib("nvvm"), load_nvidia_dynamic_lib("nvJitLink")
except DynamicLibNotFoundError as missing:
    pytest.skip(f"a part of numba-cuda[cu13] is not installed: {missing}", allow_module_level=True)

REGISTERS = 65536
"""Of a multiprocessor, sm_80 to sm_90: a block of threads that wants more does not start."""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_machine_code(name, capability, monkeypatch) -> None:
    seen = []

    def compile_only(function: Any, blocks: int, *arguments: Any, device: torch.device, threads: int = gpu.THREADS):
        gpu.compiled(function)  # Fills in the module's `cuda`.
        types = tuple(typeof(array(value) if isinstance(value, torch.Tensor) else value) for value in arguments)
        ptx, _ = cuda.compile(function, types, cc=capability, device=False, abi="numba")
        seen.append((ptx, threads))

    # Kernels call functions of elements, for whose sake the compiler asks for the device's kind.
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability))
    monkeypatch.setattr(gpu, "launch", compile_only)
    LAUNCHES[name]()
    assert len(seen) == 1, "one launch"
    ptx, threads = seen[0]
    assert ".f64" not in ptx
    assert ".local" not in ptx
    cubin, log = assemble(ptx, capability)
    assert cubin[:4] == b"\x7fELF"
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert spilled == [("0", "0", "0")], log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * threads <= REGISTERS


def assemble(ptx: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Machine code for this kind of GPU, and what the assembler says of it."""
    major, minor = capability
    linker = nvjitlink.create(2, [f"-arch=sm_{major}{minor}", "-verbose"])
    try:
        text = ptx.encode()
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, text, len(text), "kernel")
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
        return bytes(cubin), log.decode()
    finally:
        nvjitlink.destroy(linker)
