"""Descriptions of collective calls: as integers that ranks compare, and as sentences for errors.

1. `call` packs (operation, dtype, reduction, root) and the number of elements into two words. `call_of` adds a digest
   of the sizes of several tensors. Equal words mean the same call.
2. Only errors unpack the words into a sentence (`described`) and search the source line (`source_line`).
3. Asynchronous calls run on a thread whose stack does not show the caller. So `origin` keeps code and instruction of
   the caller when the call starts. Only errors search the line.
"""

from __future__ import annotations

import linecache
import sys
import threading
import zlib
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import cuda_ops


class Op(IntEnum):
    """Operations of a group."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE = 7
    GATHER = 8
    SCATTER = 9


class Call(NamedTuple):
    """One call, as the ranks compare it."""

    kind: int
    """Operation, dtype, reduction and root, in 8, 8, 8 and 32 bits from the lowest on."""
    elements: int
    """Elements of all tensors of the call; `described` shows what they mean for each operation."""
    digest: int = 0
    """32-bit digest of the sizes and dtypes of several tensors; 0 for one."""
    note: str = ""
    """Why this rank refused its arguments; not compared. Then `kind` is negative."""


_DTYPES: list[torch.dtype] = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}
_OPERATORS = {operator: code for code, operator in enumerate(dist.ReduceOp.RedOpType.__members__.values(), start=1)}
_OPERATOR_NAMES = {code: operator.name.lower() for operator, code in _OPERATORS.items()}
_ROOT_AT = 24


def call(
    op: Op,
    dtype: torch.dtype | None = None,
    elements: int = 0,
    *,
    reduction: dist.ReduceOp.RedOpType | None = None,
    root: int = -1,
) -> Call:
    """Return the description of a call with one tensor, or with equal ones.

    Args:
        op: Operation.
        dtype: Type of the elements.
        elements: Number of elements.
        reduction: Kind of the reduction.
        root: Index in the group; -1 for operations without a root.
    """
    code = op if dtype is None else op | _CODES[dtype] << 8
    if reduction is not None:
        code |= _OPERATORS[reduction] << 16
    return Call(code | root + 1 << _ROOT_AT, elements)


def call_of(
    op: Op,
    tensors: Sequence[Tensor],
    *,
    reduction: dist.ReduceOp.RedOpType | None = None,
    root: int = -1,
) -> Call:
    """Return the description of a call with several tensors, which are processed one after another.

    Args:
        op: Operation.
        tensors: At least one tensor.
        reduction: Kind of the reduction.
        root: Index in the group; -1 for operations without a root.
    """
    if len(tensors) == 1:
        return call(op, tensors[0].dtype, tensors[0].numel(), reduction=reduction, root=root)
    sizes = [(str(tensor.dtype), tensor.numel()) for tensor in tensors]
    dtype = tensors[0].dtype if len({name for name, _ in sizes}) == 1 else None
    one = call(op, dtype, sum(numel for _, numel in sizes), reduction=reduction, root=root)
    return one._replace(digest=zlib.crc32(repr(sizes).encode()))


def refused(op: Op, error: ValueError) -> Call:
    """Return the description of a call whose arguments this rank refused.

    Args:
        op: Operation.
        error: Reason.
    """
    return Call(-int(op), 0, 0, str(error))


def described(kind: int, elements: int, digest: int, ranks: Sequence[int]) -> str:
    """Return a sentence such as 'all_reduce (sum) of 4 float32'.

    Args:
        kind: See `Call`.
        elements: See `Call`.
        digest: See `Call`.
        ranks: Names of the group's ranks.
    """
    if kind == 0:
        return "no call yet"
    if kind < 0:
        return f"{Op(-kind).name.lower()} with arguments that were refused"
    op, dtype, reduction, root = kind & 255, kind >> 8 & 255, kind >> 16 & 255, (kind >> _ROOT_AT) - 1
    text = Op(op).name.lower()
    if reduction:
        text += f" ({_OPERATOR_NAMES[reduction]})"
    if op != Op.BARRIER:
        name = dtype_name(dtype) if dtype else "elements of several dtypes"
        text += f" of {name}" if op == Op.ALL_TO_ALL else f" of {elements:,} {name}"
    if digest:
        text += f" in several tensors (digest of their sizes: {digest:08x})"
    return f"{text}, root rank {ranks[root]}" if root >= 0 else text


def dtype_code(dtype: torch.dtype) -> int:
    """Return the number of a dtype, at most 8 bits.

    Args:
        dtype: Any dtype.
    """
    return _CODES[dtype]


def dtype_name(code: int) -> str:
    """Return the name of a dtype without 'torch.'.

    Args:
        code: Result of `dtype_code`.
    """
    return str(_DTYPES[code - 1]).removeprefix("torch.")


# ---- source lines ----------------------------------------------------------------------------------------------------

Frames = list[tuple[CodeType, int]]
"""Code and instruction of each frame, innermost first."""

_OWN = (
    *(str(Path(each).parent) + "/" for each in (torch.__file__, cuda_ops.__file__)),
    str(Path(__file__).parents[2]) + "/",
    str(Path(torch.__file__).parents[1] / "typing_extensions.py"),  # Its decorator wraps deprecated collectives.
    "<frozen",
)
"""Files of torch and SpeedLab, which are skipped in a search for the user's line. `_LIBRARY` has Python's own files."""

_LIBRARY = str(Path(threading.__file__).parent) + "/"

_MOST_FRAMES = 64

_own_code: dict[CodeType, bool] = {}
"""Whether code is from one of these files. A cache, because asynchronous calls check some frames each."""

_started = threading.local()
"""`frames`: the caller of the asynchronous call that this thread executes."""


def origin() -> Frames:
    """Return the frames from the caller of an asynchronous collective to the user's first frame, without formatting."""
    frames: Frames = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        frames.append((code, frame.f_lasti))
        if not _is_own(code):
            break
        frame = frame.f_back
    return frames


def carrying_out(frames: Frames | None) -> None:
    """Set the frames of the call that this thread now executes.

    Args:
        frames: Result of `origin`, or None.
    """
    _started.frames = frames


def source_line() -> str:
    """Return a line such as 'train.py:12 in main: dist.all_reduce(x)'.

    This is the innermost line outside of torch and SpeedLab; otherwise SpeedLab's innermost line outside of this
    package.
    """
    frames = getattr(_started, "frames", None) or origin()
    for code, instruction in frames:
        if not _is_own(code):
            return _formatted(code, instruction)
    here = str(Path(__file__).parents[1]) + "/"
    for code, instruction in frames:
        if code.co_filename.startswith(_OWN[2]) and not code.co_filename.startswith(here):
            return _formatted(code, instruction)
    code, instruction = frames[-1]
    return _formatted(code, instruction)


def _is_own(code: CodeType) -> bool:
    own = _own_code.get(code)
    if own is None:
        file = code.co_filename
        own = file.startswith(_OWN) or (file.startswith(_LIBRARY) and "-packages/" not in file)
        _own_code[code] = own
    return own


def _formatted(code: CodeType, instruction: int) -> str:
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    number = next(lines, code.co_firstlineno)
    text = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number} in {code.co_name}" + (f": {text[:120]}" if text else "")
