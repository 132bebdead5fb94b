"""CUDA kernels compute what their references do, as far as Numba's simulator goes. Needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ops import gpu


@pytest.mark.skipif(not gpu.available(), reason="numba-cuda is not installed")
@pytest.mark.parametrize(
    "part",
    [
        "updates",
        "onebit",
        "blockquant",
        # What these kernels are made of is in those above.
        *(pytest.param(part, marks=pytest.mark.nightly) for part in ("grad_stats", "blockwise8", "stochastic")),
    ],
)
def test_in_the_simulator(part) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cuda_simulated.py")), part],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "as defined\n", done.stderr
