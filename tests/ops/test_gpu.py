"""What a machine without a GPU, or without the compiler for one, pays and is told."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cuda_ops import gpu


def test_importing_the_operations_imports_nothing_for_gpus() -> None:
    code = (
        "import sys, cuda_ops.adamw, cuda_ops.sgd_momentum, cuda_ops.grad_stats, cuda_ops.onebit, cuda_ops.blockquant;"
        "print(*sorted(name for name in sys.modules if name.startswith(('numba.cuda', 'numba_cuda'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == []


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)

    def kernel() -> None: ...

    with pytest.raises(RuntimeError, match=r"pip install 'speedlab\[cuda\]'"):
        gpu.launch(kernel, 1, device=torch.device("cuda", 0))
    assert not gpu.available()


@pytest.mark.parametrize(("count", "blocks"), [(0, 1), (1, 1), (256, 1), (257, 2), (10_000, 40)])
def test_blocks(count, blocks) -> None:
    assert gpu.blocks_for(count) == blocks
