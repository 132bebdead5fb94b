"""Numbers in shared memory that one rank raises and others wait for."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cuda_ops.compile import kernel

_SPINS = 2_000
"""Looks without giving the core away: a few microseconds."""

_YIELDS = 2_000
"""Looks that let others run in between: a millisecond or so when nobody wants to. To wake a sleeping core takes a
virtual machine as long as a round of a collective."""

_SLEEP_NANOSECONDS = 30_000_000
"""How long a wait sleeps at most before it returns to Python, where signals are handled."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
"""Of the system call futex(2): its number, two of its operations, and how many to wake."""

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
    """Write `value` to the 64-bit number at `address`, after everything that was written before, and wake who waits."""
    _store_release(address, value)  # type: ignore[call-arg]  # Numba passes the typing context itself
    _syscall(_FUTEX, address, _WAKE, _ALL, 0, 0, 0)


@kernel()
def raise_flag_with(address: int, value: int, words: int, first: int, second: int, third: int) -> None:
    """As `raise_flag`, after three numbers were written from the address `words` on."""
    _store_release(words, first)  # type: ignore[call-arg]  # as above
    _store_release(words + 8, second)  # type: ignore[call-arg]  # as above
    _store_release(words + 16, third)  # type: ignore[call-arg]  # as above
    _store_release(address, value)  # type: ignore[call-arg]  # as above
    _syscall(_FUTEX, address, _WAKE, _ALL, 0, 0, 0)


@kernel()
def find_other_words(addresses: Any, offset: int, first: int, second: int, third: int) -> int:
    """The index of the first of `addresses` (n,) int64 from which on, `offset` bytes further, other numbers are written
    than these three; -1 if there is none."""
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
    """Wait until every number at `addresses` (n,) int64 is at least `value`; what their writers wrote before is then
    visible. Returns -1, or the index of one that is not there: after about 30 ms, or without `sleep` at once.

    A rank that waits sleeps after so many `spins` and `yields`, so that the system can give its core to a rank that
    works. (Of four ranks that only yielded, two that work may stay on one core while two that wait hold the other.) A
    sleeper watches the number's lower half, which is the one at its address on the little-endian machines that have
    `_FUTEX`.
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
                # Returns at once when the number has changed; otherwise when it does, on a signal, or after the limit.
                result = _syscall(_FUTEX, addresses[k], _WAIT, expected, limit.ctypes.data, 0, 0)
                slept += 1 if result != 0 and _load_acquire(addresses[k]) == seen else 0  # type: ignore[call-arg]
            seen = _load_acquire(addresses[k])  # type: ignore[call-arg]  # as above
    return -1


def patience_for(ranks: int, cores: int) -> tuple[int, int]:
    """(spins, yields) before a rank sleeps: none when ranks share cores, since a peer may need this one."""
    return (_SPINS, _YIELDS) if ranks <= cores else (0, 0)


def warm(dtype: object) -> None:
    """Compile; there are no dtypes."""
    number = np.zeros(4, dtype=np.int64)
    raise_flag(number.ctypes.data, 1)
    raise_flag_with(number.ctypes.data, 1, number.ctypes.data + 8, 1, 2, 3)
    find_other_words(np.array([number.ctypes.data]), 8, 1, 2, 3)
    wait_for_flags(np.array([number.ctypes.data]), 1, 0, 0, True)
