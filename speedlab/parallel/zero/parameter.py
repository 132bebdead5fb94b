"""Parameters that are views of a flat: how they print, and which reads they refuse.

The two classes are the two states of a parameter. An instance changes its class when its unit is gathered or released.
The change of its `.data` at the same time costs more.

| class                | values                                  | `.grad`                                |
|----------------------|-----------------------------------------|----------------------------------------|
| `UnshardedParameter` | available                               | refused while the engine holds it      |
| `ReshardedParameter` | refused; shape, dtype and hooks are not | refused while the engine holds it      |

torch's own code may always read: autograd and the compiler read in C++, or from modules of `_OF_TORCH`.

Some frozen parameters stay outside of flats, because their class keeps values in other tensors or replaces them
(`stays_whole`). They are whole on every rank, and nothing updates them. So at every ZeRO stage they behave as in plain
torch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from speedlab.parallel.zero.param_slot import ParamSlot
from speedlab.placement import MemoryKind


class ParameterOwner(NamedTuple):
    """The location of a parameter. The classes of `zero`, `unit` and `flat` import this file, so they are Any here."""

    zero: Any
    unit: Any
    flat: Any
    slot: ParamSlot
    index: int
    """Index of the slot in its flat."""


places: dict[int, tuple[weakref.ref[Any], int, int, int]] = {}
"""id of parameter → its Zero, and the indices of unit, flat and slot. A dict, because we do not put attributes on
tensors that we do not own."""


def find(parameter: Tensor) -> ParameterOwner | None:
    """Return the location of a parameter in its flat.

    Args:
        parameter: Any tensor.

    Returns:
        None for a tensor that no engine has.
    """
    reference, unit_index, flat_index, index = places.get(id(parameter), (lambda: None, 0, 0, 0))
    zero = reference()
    if zero is None:
        return None
    unit = zero.units[unit_index]
    flat = unit.flats[flat_index]
    return ParameterOwner(zero, unit, flat, flat.slots[index], index) if flat.parameters[index] is parameter else None


# torch's own accessors, for the engine: they bypass the checks of the classes below.
gradient_of = cast(Any, torch.Tensor.grad).__get__
set_gradient = cast(Any, torch.Tensor.grad).__set__


def clear_gradient(parameter: Tensor) -> None:
    """Set `.grad` to None, without the checks of `UnshardedParameter`.

    Args:
        parameter: Any parameter.
    """
    set_gradient(parameter, None)


_OF_TORCH = ("torch._", "torch.distributed.", "torch.fx", "torch.export")
"""Modules that read `.grad` for their own needs: the compiler with its fake tensors, and pipelines."""


class UnshardedParameter(nn.Parameter):
    """A parameter that is a view of a flat. Three differences to nn.Parameter: how it prints; it refuses copies while
    its values are released; it refuses `.grad` inside a step, because `.grad` would be None.
    """

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]  # torch's is an attribute that C++ makes
        """The gradient.

        Raises:
            RuntimeError: The engine holds the gradient, so that torch's attribute would be None.
        """
        found: Tensor | None = gradient_of(self)
        if found is None and (place := find(self)) is not None and _holds_gradient(place) and not asked_by_torch():
            refuse_gradient_read(place.slot.name)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if (place := find(self)) is not None and place.flat.trainable and not asked_by_torch():
            if value is not None:
                _refuse_gradient_write(place.slot.name)
            if _holds_gradient(place):
                refuse_gradient_read(place.slot.name)
        set_gradient(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def set_(self, *source: Any) -> Tensor:  # type: ignore[override]  # torch has an overload for each kind of source
        """Set the tensor as torch does, but ignore a call with the parameter itself.

        torch's parametrizations do this in every forward of PEFT's parameter adapters. The values do not change, so
        this must not count as a write.
        """
        return self if len(source) == 1 and source[0] is self else super().set_(*source)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refuse the hook while an engine has the parameter: the engine's own hook takes the gradient first.

        Args:
            hook: The hook.

        Raises:
            RuntimeError: An engine has this parameter.
        """
        if (place := find(self)) is not None:
            raise RuntimeError(
                f"{place.slot.name}: a post-accumulate hook reads .grad, which the engine takes first. "
                "parameter.register_hook gets this rank's gradient, multiplied as the loss is (1 / (accumulation × "
                "ranks), and float16's loss scale); a hook of optimizer.register_step_pre_hook(hook) sees the sums "
                "over the ranks"
            )
        return super().register_post_accumulate_grad_hook(hook)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        place = find(self)
        if place is None:
            return super().__repr__()
        shape = "×".join(str(n) for n in self.shape)
        dtype = str(self.dtype).removeprefix("torch.")
        zero_policy = place.flat.zero_policy
        is_at = "" if zero_policy.parameters_at is MemoryKind.DEVICE else f" on {zero_policy.parameters_at.value}"
        where = f"{zero_policy.parameters.value}{is_at}"
        head = f"Parameter {place.slot.name} ({shape} {dtype}, unit {place.unit.name}, {where}"
        owners = ", ".join(f"rank {rank}: [{low}:{high})" for rank, low, high in owners_of(place.flat, place.slot))
        if not place.flat.gathered:
            return f"{head}; owners: {owners}; speedlab.gather(parameter) gives the whole)"
        return f"{head}; owners: {owners})\n{self.detach()!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter. Raises RuntimeError if the values are released."""
        if id(self) not in memo:
            _refuse_absent(self, "copy.deepcopy")
            memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_absent(self, "pickle (torch.save)")
        return super().__reduce_ex__(protocol)


# fmt: off
_WITHOUT_VALUES = frozenset([
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared", "is_same_size",
    "is_set_to", "get_device", "type", "untyped_storage", "storage", "_typed_storage", "data_ptr", "_is_view",
    "_is_zerotensor", "is_neg", "is_conj", "__len__", "__hash__", "__repr__", "__format__", "__dir__",
    "requires_grad_", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
    "randn_like", "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided",
    "has_names", "_has_compatible_shallow_copy_type", "dim_order", "is_coalesced",
])
# fmt: on
"""Functions that read no values of a tensor."""

_OF_VALUES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
"""Attributes that return values."""

_LOOKS = frozenset(["data", "view_as"])
"""Attributes and methods that return the same tensor. Callers often only want its shape."""


class ReshardedParameter(UnshardedParameter):
    """A parameter whose values are released. Shape, dtype and hooks are available; reads of values raise
    RuntimeError.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _without_values(func, args, kwargs or {})


class _Absent(Tensor):
    """The `.data` of a parameter whose values are released."""

    parameter_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _without_values(func, args, kwargs or {})


def _without_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__
        allowed = name not in _OF_VALUES and (name != "data" or func.__name__ == "__set__")
    else:
        # `type` with a dtype converts the values.
        allowed = name in _WITHOUT_VALUES and not (name == "type" and len(args) > 1)
    if not allowed and name not in _LOOKS:
        _refuse_released(_first_name(args, kwargs), name)
    with torch._C.DisableTorchFunctionSubclass():
        made = func(*args, **kwargs)
    if allowed:
        return made
    # as_subclass would add an autograd node, but pipelines expect the parameter's accumulator directly below the view.
    made.__class__ = _Absent
    made.parameter_name = _first_name(args, kwargs)
    return made


def _first_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name of the first released parameter among the arguments, which may be lists of tensors."""
    given = [*args, *kwargs.values()]
    for each in (tensor for some in given for tensor in (some if isinstance(some, list | tuple) else [some])):
        if isinstance(each, _Absent):
            return each.parameter_name
        if isinstance(each, ReshardedParameter) and (place := find(each)) is not None:
            return place.slot.name
    return "a parameter"


def _holds_gradient(place: ParameterOwner) -> bool:
    """Return whether the engine has a gradient of the parameter in the current step."""
    gradient = place.flat.gradient
    return gradient is not None and bool(gradient.used[place.index])


def asked_by_torch() -> bool:
    """Return whether torch's own code reads the property. Call it directly from the property: it looks two
    frames up.
    """
    frame = sys._getframe(2)
    asks: str = frame.f_globals.get("__name__", "")
    # `Module.to` and similar methods move a gradient together with its parameter. None stays None.
    return asks.startswith(_OF_TORCH) or frame.f_code.co_name == "_apply"


def _refuse_absent(parameter: Tensor, who: str) -> None:
    place = find(parameter)
    if place is None:
        return
    place.zero.refuse_late(who)
    if not place.flat.gathered or place.unit.gathers:  # Or its gather is pending.
        raise RuntimeError(
            f"{who}: {place.slot.name} is partitioned (ZeRO stage 3) or away from the device, so that its values are "
            "not here; engine.state_dict(), on all ranks, puts all parameters together, speedlab.gather(parameter) one"
        )


def refuse_gradient_read(name: str) -> NoReturn:
    """Raise RuntimeError: the caller reads or clears `.grad` of the parameter `name` while the engine holds its
    gradient.
    """
    raise RuntimeError(
        f"{name}: .grad was used between engine.backward and engine.step, where the gradient is in the engine and "
        ".grad is None, so that clipping or clearing it would do nothing. Set clip_norm in the configuration; clip by "
        "value and add noise in a hook of optimizer.register_step_pre_hook. engine.step() clears gradients, "
        "engine.global_grad_norm has their norm afterwards"
    )


def _refuse_gradient_write(name: str) -> NoReturn:
    """Raise RuntimeError: the caller set `.grad` of the parameter `name`."""
    raise RuntimeError(
        f"{name}: .grad was set by hand, and no update of the engine uses it. Let engine.backward compute the gradient "
        "of a loss; change what an update uses by optimizer.register_step_pre_hook(hook)"
    )


def _refuse_released(name: str, what: str) -> NoReturn:
    """Raise RuntimeError: `what`, a function of torch, needs values of the released parameter `name`."""
    raise RuntimeError(
        f"{name}: {what} needs its values, and they are partitioned (ZeRO stage 3) or away from the device. "
        "speedlab.gather(parameter) and engine.state_dict(), on all ranks, give whole values, for averages of weights "
        "(EMA, AveragedModel) too. A loss that reads parameters itself needs a ZeRO stage below 3; another shape "
        "(resize_token_embeddings) comes before initialize"
    )


def owners_of(flat: Any, slot: ParamSlot) -> list[tuple[int, int, int]]:
    """Return (rank, start, end) for each rank that owns elements of a parameter, in elements of the parameter.

    Args:
        flat: The flat of the parameter.
        slot: The position of the parameter in the flat.
    """
    size = flat.padded // flat.gather_group.size
    owned = []
    for index, rank in enumerate(flat.gather_group.ranks):
        low = max(slot.offset, index * size)
        high = min(slot.offset + slot.numel, (index + 1) * size)
        if low < high:
            owned.append((rank, low - slot.offset, high - slot.offset))
    return owned


def stays_whole(parameter: Tensor) -> bool:
    """Return whether a parameter stays outside of flats, because of its class.

    - A tensor subclass of several tensors, such as torchao's quantized weights.
    - bitsandbytes' 8-bit weights, which each forward assigns to `.data`; and its 4-bit weights on a CPU, which a
      forward without gradients packs.

    Args:
        parameter: Any parameter.
    """
    kind = type(parameter)
    if is_traceable_wrapper_subclass(parameter):
        # A DTensor is a shard of a plain tensor, which a flat can hold.
        return not kind.__module__.startswith("torch.distributed.")
    if kind.__module__.partition(".")[0] != "bitsandbytes":
        return False
    return kind.__name__ == "Int8Params" or parameter.device.type == "cpu"


def tensors_inside(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a parameter, by names that start with `name`.

    Args:
        name: Name of the parameter.
        tensor: The parameter; may be a tensor subclass.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor.data if isinstance(tensor, nn.Parameter) else tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        yield from tensors_inside(f"{name}.{inner}", getattr(tensor, inner))
