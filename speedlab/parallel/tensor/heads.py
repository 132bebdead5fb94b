"""Attention heads under tensor parallelism: cuts are between heads, and attention modules get their new head counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from speedlab.layout import LayoutError
from speedlab.parallel.tensor.tp_plan import GPT, PlanError, class_name

_SIZES = ("head_size", "head_dim", "attention_head_size", "key_value_proj_dim")
_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("all_head_size", "inner_dim", "split_size")
_GROUPS = "num_key_value_groups"
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout", "dropout_p", "attention_probs_dropout_prob")
"""Names of attributes that attention modules of different families read in their forward."""

_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate", "attn_dropout")
"""Names of the attention dropout in configurations."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of one attention module, of which this rank has `1 / size`."""

    name: str
    module: nn.Module
    size: int
    count: int
    head_size: int

    @classmethod
    def of(cls, name: str, module: nn.Module, widths: Sequence[int], size: int) -> Heads | None:
        """Return the heads of a module; None if it is no attention.

        Args:
            name: Name of the module.
            module: The module.
            widths: Number of outputs of each of its projections.
            size: Number of tensor-parallel ranks.

        Raises:
            LayoutError: The heads do not divide by `size`.
            PlanError: The module lacks an attribute that the cut needs.
        """
        head_size, declared = _first(module, _SIZES), _first(module, _COUNTS)
        if declared is None and head_size is not None:
            declared = _first(getattr(module, "config", None), _COUNTS)
        if declared is None and head_size is None:
            if "attention" in type(module).__name__.lower():
                raise PlanError(
                    f"{name} ({type(module).__name__}) does not say how large its heads are; give it an attribute "
                    f"head_dim, or leave its layers out of the plan"
                )
            return None
        # Keys and values may have fewer heads than queries, so the widest projection counts.
        count = declared or max(widths) // (head_size or 1)
        if getattr(module, "v_head_dim", head_size) != head_size:
            raise PlanError(f"{name}: heads whose values have another size than their keys are not cut; leave it out")
        if count % size:
            raise LayoutError(f"{name}: tp {size}: {count} heads do not divide by {size}; {_divisors(count)} do")
        heads = cls(
            name=name, module=module, size=size, count=count, head_size=head_size or max(1, max(widths) // count)
        )
        heads._refuse_dropout()
        return heads

    def of_layer(self, width: int, layer: str, *, embedding: bool) -> tuple[int, int]:
        """Return (number of heads, elements per head) of a projection.

        Args:
            width: Outputs of the projection, or columns of an embedding.
            layer: Name of the layer, for messages.
            embedding: Whether the layer is an embedding.

        Raises:
            PlanError: The outputs are not heads of this attention.
            LayoutError: The ranks can neither divide nor share these heads.
        """
        least = self.count if embedding else self.count * self.head_size
        if width % self.count == 0 and width >= least:
            return self.count, width // self.count
        count = width // self.head_size
        if count == 0 or width % self.head_size or self.count % count:
            raise PlanError(
                f"{layer}: {width} outputs are neither {self.count} heads nor a divisor of them of {self.head_size} "
                f"elements each; leave {self.name} out of the plan"
            )
        if count % self.size and self.size % count:
            both = [n for n in range(1, self.count + 1) if self.count % n == 0 and (count % n == 0 or n % count == 0)]
            raise LayoutError(
                f"{layer}: tp {self.size}: {count} key and value heads can neither be divided by {self.size} nor "
                f"shared by {self.size} / {count} ranks each; tp {_listed(both)} would work"
            )
        return count, self.head_size

    def changes(self, key_value_count: int) -> dict[str, Any]:
        """Return the attributes of the module that change on a rank, with their new values.

        Args:
            key_value_count: Number of key and value heads of the full module.
        """
        changed = {name: value // self.size for name in (*_COUNTS, *_WIDTHS) if (value := _number(self.module, name))}
        for name in _KEY_VALUE_COUNTS:
            if _number(self.module, name):
                changed[name] = max(1, key_value_count // self.size)
        groups = _number(self.module, _GROUPS)
        if groups and key_value_count < self.size:
            changed[_GROUPS] = groups * key_value_count // self.size
        return changed

    def _refuse_dropout(self) -> None:
        """Refuse dropout of attention probabilities: masks of a rank's own heads would differ from those of one
        process. The built-in GPT draws correct masks.
        """
        if class_name(self.module).startswith(f"{GPT}."):
            return
        dropped = attention_dropout(self.name, self.module)
        if dropped is not None:
            p, where = dropped
            raise PlanError(
                f"{self.name}: attention probabilities are dropped with probability {p}, and tensor parallelism "
                f"would drop others than one process does; set {where} to 0"
            )


def attention_dropout(name: str, module: nn.Module) -> tuple[float, str] | None:
    """Return (probability, name of the setting) of the dropout of attention probabilities; None if there is none.

    Args:
        name: Name of the attention module.
        module: The module.
    """
    for attribute in _DROPOUTS:
        value = getattr(module, attribute, None)
        p = getattr(value, "p", value)
        if isinstance(p, float) and p > 0:
            config = getattr(module, "config", None)
            fields = [field for field in _DROPOUT_FIELDS if getattr(config, field, None) == p]
            return p, f"{fields[0]} of the model's configuration" if fields else f"{name}.{attribute}"
    return None


def _first(module: object, names: Sequence[str]) -> int | None:
    return next((value for name in names if (value := _number(module, name))), None)


def _number(module: object, name: str) -> int | None:
    value = getattr(module, name, None)
    return value if isinstance(value, int) else None


def _divisors(count: int) -> str:
    return _listed([n for n in range(1, count + 1) if count % n == 0])


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
