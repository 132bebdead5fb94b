"""Compare the operations of cuda_ops with their peers and with a lower bound: `speedlab bench kernels`.

The lower bound ("floor") of a memory-bound operation is the time to touch the same number of bytes here, measured by a
sum in place or a copy. The floor of the linear cross-entropy is the time of its matrix products alone. Measurements are
interleaved. Peers that are not installed are named and left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from speedlab.bench import kernel_cases
from speedlab.calibrate.table import BenchRow, missing, report
from speedlab.config.command_line import read_options

CASES: dict[str, Callable[[torch.device, int], Iterator[BenchRow]]] = {
    "adamw": kernel_cases.adamw_rows,
    "blockwise8": kernel_cases.blockwise8_rows,
    "round_stochastically": kernel_cases.rounding_rows,
    "sgd_momentum": kernel_cases.sgd_rows,
    "grad_stats": kernel_cases.grad_stats_rows,
    "onebit": kernel_cases.onebit_rows,
    "adam_frozen": kernel_cases.frozen_rows,
    "blockquant": kernel_cases.blockquant_rows,
    "linear_cross_entropy": kernel_cases.loss_rows,
    "block_sparse_attention": kernel_cases.attention_rows,
    "torch_attention": kernel_cases.torch_attention_rows,
}
"""Name of an operation -> function that yields its rows, given the device and the number of rounds."""


_THREADED = ("adamw", "blockwise8", "round_stochastically")
"""Operations that the host runs for devices with offloaded states, so the thread count matters."""


@dataclass(frozen=True, kw_only=True)
class KernelsOptions:
    """Every kernel next to its peers. `ratio` > 1: ours is faster; `limit_share`: share of the floor's speed."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(name="only")] = ()
    """Operations to measure; all when left out."""
    threads: tuple[int, ...] = (1, 2)
    """CPU thread counts to measure the host's optimizer kernels with (AdamW and its states); the others use the first.
    """
    device: str = "cpu"
    """cpu or cuda."""
    rounds: int = 9
    """Interleaved rounds; medians are taken over them."""
    json: Path | None = None
    """Also write one JSON record for each row to this file."""


def main(argv: list[str] | None = None) -> None:
    """Run `speedlab bench kernels` and print the table.

    Args:
        argv: command-line arguments; None means those of the process.
    """
    options = read_options(KernelsOptions, argv, "speedlab bench kernels")
    unknown = [name for name in options.only if name not in CASES]
    if unknown:
        print(f"speedlab bench kernels: no operation {unknown[0]!r}; there are {', '.join(CASES)}", file=sys.stderr)
        sys.exit(2)
    device = torch.device(options.device)
    for peer in missing():
        print(f"not installed, left out: {peer} (make bench installs it)", file=sys.stderr)
    found: list[BenchRow] = []
    for name in options.only or CASES:
        # The thread count matters only for operations that compete for memory bandwidth on the CPU.
        for threads in options.threads if name in _THREADED and device.type == "cpu" else options.threads[:1]:
            print(f"{name}, {threads} thread{'s' if threads > 1 else ''} ...", file=sys.stderr, flush=True)
            torch.set_num_threads(threads)
            found += CASES[name](device, options.rounds)
    report(found, options.json)
