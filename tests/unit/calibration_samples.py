"""A machine as if it had been measured."""

from __future__ import annotations

from speedlab.planner.calibration import Calibration, Constants, store
from speedlab.planner.time.kernels import Rates

RATES = Rates(matmul_flops=5e10, attention_flops=2e10, memory_bytes=8e9, element_bytes=4, kernel_seconds=1e-5)


def constants(**changes) -> Constants:
    values = {
        "engines": 2,
        "dtype": "float32",
        "threads": 1,
        "rates": {"rotary": RATES},
        "link_bytes_per_second": 4e9,
        "link_seconds": 3e-5,
        "message_bytes_per_second": 2e9,
        "event_seconds": {"step": 1e-3},
        "factors": {},
        "block_error": 0.01,
    }
    return Constants(**{**values, **changes})


def calibration(*found: Constants, **changes) -> Calibration:
    values = {
        "machine": store.this_machine(),
        "device": "cpu",
        "cores": 2,
        "memory_bytes": 8 * 2**30,
        "created": 1.8e9,
        "rates": {"copy (GB/s)": 8.0},
        "process_bytes": 300 * 2**20,
        "constants": found or (constants(),),
    }
    return Calibration(**{**values, **changes})
