"""Flags in shared memory: one rank sets a number, others wait until it reaches a value."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cuda_ops.compile import kernel

_SPINS = 2_000
"""Checks in a busy loop: a few microseconds."""

_YIELDS = 2_000
"""Checks with a `sched_yield` in between: about a millisecond if no other thread wants the core. In a virtual machine,
waking a sleeping core takes as long as a round of a collective, so that a wait should not sleep early.
"""

_SLEEP_NANOSECONDS = 30_000_000
"""Maximum sleep of a wait before it returns to Python, which handles signals."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
"""Constants of the system call futex(2): two operations, and the number of threads to wake. `_FUTEX` is its number."""

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


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
    """Write `value` to the 64-bit number at `address` after all earlier writes, and wake the waiting ranks.

    Args:
        address: Address of the flag.
        value: New value.
    """
    _store_release(address, value)  # type: ignore[call-arg]  # Numba passes the typing context itself
    _syscall(_FUTEX, address, _WAKE, _ALL, 0, 0, 0)


@kernel()
def raise_flag_with(address: int, value: int, words: int, first: int, second: int, third: int) -> None:
    """Write three numbers, then raise a flag as `raise_flag` does.

    Args:
        address: Address of the flag.
        value: New value.
        words: Address of the three numbers.
        first: First number.
        second: Second number.
        third: Third number.
    """
    _store_release(words, first)  # type: ignore[call-arg]  # as above
    _store_release(words + 8, second)  # type: ignore[call-arg]  # as above
    _store_release(words + 16, third)  # type: ignore[call-arg]  # as above
    _store_release(address, value)  # type: ignore[call-arg]  # as above
    _syscall(_FUTEX, address, _WAKE, _ALL, 0, 0, 0)


@kernel()
def find_other_words(addresses: Any, offset: int, first: int, second: int, third: int) -> int:
    """Return the index of the first address where the three numbers differ from the given ones; -1 if there is none.

    Args:
        addresses: (n,) int64.
        offset: Bytes from each address to its three numbers.
        first: Expected first number.
        second: Expected second number.
        third: Expected third number.
    """
    for k in range(addresses.shape[0]):
        at = addresses[k] + offset
        if (
            _load_acquire(at) != first  # type: ignore[call-arg]  # as above
            or _load_acquire(at + 8) != second  # type: ignore[call-arg]  # as above
            or _load_acquire(at + 16) != third  # type: ignore[call-arg]  # as above
        ):
            return k
    return -1


@kernel()
def wait_for_flags(addresses: Any, value: int, spins: int, yields: int, sleep: bool) -> int:
    """Wait until every flag is at least `value`. The earlier writes of their writers are then visible.

    A waiting rank sleeps after `spins` and `yields`, so that the system can give its core to a working rank. (If four
    ranks only yielded, two working ranks could share one core while two waiting ranks hold the other.) The futex
    watches the lower half of the number, which is at its address on the little-endian machines in `_FUTEX`.

    Args:
        addresses: (n,) int64, addresses of the flags.
        value: Value to wait for.
        spins: Checks in a busy loop.
        yields: Checks with a yield in between.
        sleep: Sleep afterwards, for about 30 ms at most; if False, return after the spins.

    Returns:
        -1 if all flags have the value, otherwise the index of one that does not.
    """
    limit = np.array([0, _SLEEP_NANOSECONDS], dtype=np.int64)
    for k in range(addresses.shape[0]):
        looks = slept = 0
        seen = _load_acquire(addresses[k])  # type: ignore[call-arg]  # as above
        while seen < value:
            looks += 1
            if looks > spins and not sleep:
                return k
            if spins < looks <= spins + yields:
                _sched_yield()
            elif looks > spins + yields:
                if slept > 0:
                    return k
                expected = seen & 0xFFFFFFFF
                # Returns at once if the number has changed; otherwise on a change, a signal, or the time limit.
                result = _syscall(_FUTEX, addresses[k], _WAIT, expected, limit.ctypes.data, 0, 0)
                slept += 1 if result != 0 and _load_acquire(addresses[k]) == seen else 0  # type: ignore[call-arg]
            seen = _load_acquire(addresses[k])  # type: ignore[call-arg]  # as above
    return -1


def patience_for(ranks: int, cores: int) -> tuple[int, int]:
    """Return (spins, yields) before a rank sleeps: (0, 0) if ranks share cores, because a peer may need this core.

    Args:
        ranks: Ranks on this host.
        cores: Cores of this host.
    """
    return (_SPINS, _YIELDS) if ranks <= cores else (0, 0)


def warm(dtype: object) -> None:
    """Compile the kernels.

    Args:
        dtype: Ignored.
    """
    number = np.zeros(4, dtype=np.int64)
    raise_flag(number.ctypes.data, 1)
    raise_flag_with(number.ctypes.data, 1, number.ctypes.data + 8, 1, 2, 3)
    find_other_words(np.array([number.ctypes.data]), 8, 1, 2, 3)
    wait_for_flags(np.array([number.ctypes.data]), 1, 0, 0, True)
