"""How a rank describes a call to its peers: as numbers that all compare, and as a sentence for errors.

1. `call` packs (operation, dtype, reduction, root) and the number of elements into two words; `with_sizes` adds a
   digest of the sizes of a list of tensors. Equal words mean the same call.
2. The words are unpacked into a sentence (`described`), and the source line is searched (`source_line`), only for an
   error.
3. Asynchronous calls run on a thread whose stack says nothing about the caller. So `origin` keeps the code and the
   instruction of the caller when such a call is started; its line, too, is searched only for an error.
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
    """What a rank may call."""

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
    """Operation, dtype, reduction and root, 8, 8, 8 and 32 bits from the lowest on."""
    elements: int
    """Of all its tensors; what "elements" means for each operation is in `described`."""
    digest: int = 0
    """32 bits of the sizes and dtypes of its tensors, if there are several."""
    note: str = ""
    """Why the arguments of this rank were refused; not compared. The kind is negative then."""


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
    """A call of one tensor, or of equal ones. `root`: an index in the group, -1 for operations without one."""
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
    """A call of `tensors`, which are carried out one after the other."""
    if len(tensors) == 1:
        return call(op, tensors[0].dtype, tensors[0].numel(), reduction=reduction, root=root)
    sizes = [(str(tensor.dtype), tensor.numel()) for tensor in tensors]
    dtype = tensors[0].dtype if len({name for name, _ in sizes}) == 1 else None
    one = call(op, dtype, sum(numel for _, numel in sizes), reduction=reduction, root=root)
    return one._replace(digest=zlib.crc32(repr(sizes).encode()))


def refused(op: Op, error: ValueError) -> Call:
    """A call whose arguments this rank has refused."""
    return Call(-int(op), 0, 0, str(error))


def described(kind: int, elements: int, digest: int, ranks: Sequence[int]) -> str:
    """'all_reduce (sum) of 4 float32'. `ranks`: the names of the ranks of the group."""
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
    """The number of a dtype in a word, at most 8 bits."""
    return _CODES[dtype]


def dtype_name(code: int) -> str:
    return str(_DTYPES[code - 1]).removeprefix("torch.")


# ---- source lines ----------------------------------------------------------------------------------------------------

Frames = list[tuple[CodeType, int]]
"""Code and instruction of each frame, innermost first."""

_OWN = (
    *(str(Path(each).parent) + "/" for each in (torch.__file__, cuda_ops.__file__)),
    str(Path(__file__).parents[2]) + "/",
    str(Path(torch.__file__).parents[1] / "typing_extensions.py"),  # Its decorator is around deprecated collectives.
    "<frozen",
)
"""Files that are not the user's: torch's and SpeedLab's; Python's own are those of `_LIBRARY`."""

_LIBRARY = str(Path(threading.__file__).parent) + "/"

_MOST_FRAMES = 64

_own_code: dict[CodeType, bool] = {}
"""Whether code is from one of these files. Filled by asynchronous calls, which look at a few frames each."""

_started = threading.local()
"""`frames`: of the caller whose asynchronous call this thread carries out."""


def origin() -> Frames:
    """Where the caller of an asynchronous collective is, up to the first frame of the user's. Formatting waits until
    there is an error."""
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
    """This thread now carries out what was started at `frames`."""
    _started.frames = frames


def source_line() -> str:
    """'train.py:12 in main: dist.all_reduce(x)': the innermost line that is not torch's or SpeedLab's; else SpeedLab's
    innermost line outside of this package."""
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
