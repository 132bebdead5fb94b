"""Numbers in shared memory that one rank raises and others wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cuda_ops.compile import kernel

_SPINS = 2_000
"""Looks without giving the core away: a few microseconds."""

_YIELDS = 1_000
"""Looks that let others run in between: about a millisecond when nobody wants to."""

_NAP_MICROSECONDS = 50

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@intrinsic
def _load_acquire(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, ordering="acquire", align=8)

    return types.int64(types.intp), generate


@intrinsic
def _store_release(typingctx: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@kernel()
def raise_flag(address: int, value: int) -> None:
    """Write `value` to the 64-bit number at `address`, after everything that was written before."""
    _store_release(address, value)  # type: ignore[call-arg]  # Numba passes the typing context itself


@kernel()
def wait_for_flags(addresses: Any, value: int, spins: int, naps: int) -> int:
    """Wait until every number at `addresses` (n,) int64 is at least `value`; what their writers wrote before is then
    visible. Returns -1, or the index of one that is not there after about `naps` × 0.1 ms (0: looks once)."""
    for k in range(addresses.shape[0]):
        looks = 0
        while _load_acquire(addresses[k]) < value:  # type: ignore[call-arg]  # as above
            looks += 1
            if looks <= spins:
                continue
            if naps == 0 or looks > spins + _YIELDS + naps:
                return k
            if looks <= spins + _YIELDS:
                _sched_yield()
            else:
                _usleep(np.uint32(_NAP_MICROSECONDS))
    return -1


def spins_for(ranks: int, cores: int) -> int:
    """How often to look before giving the core away: not at all when ranks share cores, since a peer may need this
    one."""
    return _SPINS if ranks <= cores else 0


def warm(dtype: object) -> None:
    """Compile; there are no dtypes."""
    number = np.zeros(1, dtype=np.int64)
    raise_flag(number.ctypes.data, 1)
    wait_for_flags(np.array([number.ctypes.data]), 1, 0, 0)
