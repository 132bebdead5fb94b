"""Tensor parallelism of a plain nn.Module (arXiv:1909.08053): slices of parameters, and patched forwards.

1. A plan says which layers are cut, and how. This gives each rank's slice of each parameter. Parameters that several
   modules share are cut in the same way everywhere.
2. All checks run before anything changes.
3. `cut` reduces each parameter to this rank's slice. Parameters stay the same objects under the same names. So ZeRO
   and optimizers see plain, smaller parameters.
4. `attach` patches the forwards of the cut layers, and sizes that other modules store. `detach` undoes this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speedlab.comm import Group
from speedlab.layout import LayoutError, ShardRange
from speedlab.parallel.module_patches import ModulePatch, ModulePatches
from speedlab.parallel.tensor.gpt_plan import BuiltIn
from speedlab.parallel.tensor.heads import Heads
from speedlab.parallel.tensor.layers import (
    Inputs,
    check_embedding,
    column,
    columns_of_embedding,
    outputs_dim,
    row,
    vocabulary,
)
from speedlab.parallel.tensor.slicing import cut_along, take
from speedlab.parallel.tensor.tp_plan import LayerSharding, PlanError, Style, find_plan, resolve


class TensorParallel:
    """The slices of a model that one tensor-parallel rank holds."""

    def __init__(
        self, model: nn.Module, group: Group, *, plan: Mapping[str, str] | None = None, sequence: bool = False
    ) -> None:
        """Check and plan. Nothing changes until `cut` and `attach`. No communication.

        Args:
            model: The full model, on any device, also meta.
            group: The tensor-parallel ranks. With one rank nothing is cut.
            plan: Pattern of module names → style; None: find the model's own plan.
            sequence: Whether to split tokens between cut layers (sequence parallelism; only the built-in GPT).

        Raises:
            PlanError: The plan cannot be applied (a ValueError).
            LayoutError: The sizes cannot be divided (a ValueError).
        """
        self.group, self.sequence = group, sequence
        self.parts: dict[str, ShardRange] = {}
        """Full parameter name → this rank's slice; only cut parameters."""
        self.partial: frozenset[str] = frozenset()
        """Parameters that are complete on each rank but have partial gradients. Sum these gradients over the group."""
        self._sharers: dict[str, int] = {}
        """Full parameter name → index of the first rank that holds the same slice, if several ranks do."""
        self._model = model
        self._changes: list[ModulePatch] = []
        self._made = ModulePatches()
        self._hooks: list[Any] = []
        self._parents: list[tuple[nn.Module, Inputs]] = []
        if group.size > 1:
            self._names = {id(parameter): name for name, parameter in model.named_parameters()}
            layers = self._plan(model, find_plan(model) if plan is None else plan)
            if plan is None:
                self._refuse_forgotten(model, layers)

    def first_holder(self, name: str) -> int:
        """Return the first rank that holds this rank's slice of a parameter. That rank counts the slice in norms and
        checkpoints.

        Args:
            name: Full name of the parameter.

        Returns:
            An index in the group.
        """
        return self._sharers.get(name, self.group.index) if name in self.parts else 0

    # ---- planning ----------------------------------------------------------------------------------------------------

    def _plan(self, model: nn.Module, plan: Mapping[str, str]) -> dict[str, tuple[nn.Module, Style]]:
        layers = {name: (module, style) for name, module, style in resolve(model, plan)}
        self._add_tied(model, layers)
        partial = {
            self._names[id(p)]
            for module, style in layers.values()
            if style.cut is LayerSharding.NOTHING_BUT_VALUES
            for p in module.parameters()
        }
        by_parent: dict[str, dict[str, tuple[nn.Module, Style]]] = {}
        for name, layer in layers.items():
            by_parent.setdefault(name.rpartition(".")[0], {})[name] = layer
        for parent, children in by_parent.items():
            self._plan_outputs(parent, model.get_submodule(parent), children)
        for name, (module, style) in layers.items():
            if style.cut is LayerSharding.INPUT:
                self._plan_inputs(name, module, style)
        cut = {module for module, style in layers.values() if style.cut in (LayerSharding.OUTPUT, LayerSharding.INPUT)}
        gpts = [BuiltIn(name, gpt, self.group, cut, sequence=self.sequence) for name, gpt in BuiltIn.in_model(model)]
        for gpt in gpts:
            gpt.check({name: style for name, (_, style) in layers.items()})
        if self.sequence and not gpts:
            raise PlanError(
                f"sequence parallelism is built for this package's GPT, not for {type(model).__name__}; set "
                f"sequence: false"
            )
        for gpt in gpts:
            self._changes += gpt.changes()
            partial |= {*gpt.partial()}
        self.partial = frozenset(partial)
        return layers

    def _refuse_forgotten(self, model: nn.Module, layers: Mapping[str, tuple[nn.Module, Style]]) -> None:
        """Raise PlanError for parameters that a model's own plan omits, next to layers whose outputs stay cut.

        Their gradients may be complete or partial. A wrong guess would silently train wrong values.
        """
        named = {id(parameter) for module, _ in layers.values() for parameter in module.parameters()}
        alongside = {
            name.rpartition(".")[0]
            for name, (_, style) in layers.items()
            if style.cut is LayerSharding.OUTPUT and not style.whole_outside
        }
        for parent in sorted(alongside):
            for name, parameter in model.get_submodule(parent).named_parameters(prefix=parent):
                if id(parameter) not in named and self._names[id(parameter)] not in self.partial:
                    raise PlanError(
                        f"tp_plan: the plan of {type(model).__name__} says nothing of {name}, which is next to "
                        f"layers that are cut; give tp_plan={{**model._tp_plan, {name.rpartition('.')[0]!r}: …}}, "
                        f"'replicated' where it sees whole values, 'replicated_with_grad_allreduce' where it sees a "
                        f"rank's part"
                    )

    def _add_tied(self, model: nn.Module, layers: dict[str, tuple[nn.Module, Style]]) -> None:
        """Cut modules that share a matrix with a cut embedding or head over the vocabulary, too."""
        weights = {
            id(getattr(module, "weight", None))
            for module, style in layers.values()
            if style.cut is not LayerSharding.NOTHING
        }
        known = {id(module) for module, _ in layers.values()}
        for name, module in model.named_modules():
            if id(module) in known or id(getattr(module, "weight", None)) not in weights - {id(None)}:
                continue
            if isinstance(module, nn.Embedding):
                layers[name] = module, Style(cut=LayerSharding.INPUT)
            elif isinstance(module, nn.Linear):
                layers[name] = module, Style(cut=LayerSharding.OUTPUT, whole_outside=True)

    def _plan_outputs(self, parent_name: str, parent: nn.Module, children: dict[str, tuple[nn.Module, Style]]) -> None:
        """Plan the column-parallel layers of one parent."""
        columns = {name: layer for name, layer in children.items() if layer[1].cut is LayerSharding.OUTPUT}
        local = {name: layer for name, layer in columns.items() if not layer[1].whole_outside}
        widths = {name: _width(name, module) // style.packed for name, (module, style) in columns.items()}
        heads = Heads.of(parent_name, parent, [widths[name] for name in local], self.group.size) if local else None
        # A list of layers has no forward, so no hook could drop inputs that several layers share.
        several = len(columns) > 1 and not isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        inputs = Inputs(self.group, sequence=self.sequence, several=several)
        self._parents.append((parent, inputs))
        counts = []
        for name, (module, style) in columns.items():
            step, sharers = 1, 1
            if heads is not None and name in local:
                count, step = heads.of_layer(widths[name], name, embedding=isinstance(module, nn.Embedding))
                counts.append(count)
                sharers = max(1, self.group.size // count)
            self._cut_outputs(name, module, style, step, inputs, sharers=sharers)
        if heads is not None:
            for attribute, value in heads.changes(min(counts)).items():
                self._changes.append(ModulePatch(parent, attribute, lambda _, value=value: value))

    def _cut_outputs(self, name: str, module: Any, style: Style, step: int, inputs: Inputs, *, sharers: int) -> None:
        """Plan one column-parallel layer. `sharers`: ranks that hold the same outputs, if there are fewer heads than
        ranks.
        """
        if isinstance(module, nn.Embedding):
            check_embedding(name, module)
            self._add_part(module.weight, 1, step=step, sharers=sharers)
            self._changes.append(columns_of_embedding(module, style, self.group))
            return
        dim = outputs_dim(name, module)
        weight = self._add_part(module.weight, dim, packed=style.packed, step=step, sharers=sharers)
        if module.bias is not None:
            self._add_part(module.bias, 0, packed=style.packed, step=step, sharers=sharers)
        shared = weight if sharers > 1 else None
        self._changes.append(column(module, style, self.group, inputs, weight.shape[dim], shared))
        if hasattr(module, "nf"):  # Conv1D reads the width of its output from `nf`.
            self._changes.append(ModulePatch(module, "nf", lambda _: weight.own_shape[dim]))

    def _plan_inputs(self, name: str, module: Any, style: Style) -> None:
        """Plan one row-parallel layer."""
        if isinstance(module, nn.Embedding):
            check_embedding(name, module)
            part = self._add_part(module.weight, 0)
            self._changes += vocabulary(module, self.group, *part.ranges[0])
            return
        outputs = outputs_dim(name, module)
        self._add_part(module.weight, 1 - outputs)
        self._changes.append(row(name, module, style, self.group, outputs, sequence=self.sequence))

    def _add_part(self, parameter: Tensor, dim: int, *, packed: int = 1, step: int = 1, sharers: int = 1) -> ShardRange:
        size, index = self.group.size, self.group.index
        name = self._names[id(parameter)]
        # `sharers` neighbouring ranks hold the same slice.
        part = cut_along(parameter.shape, dim, size // sharers, index // sharers, packed=packed, step=step)
        if parameter.shape[dim] // packed // step < size // sharers:
            raise LayoutError(
                f"{name}: tp {size}: its {parameter.shape[dim] // packed} elements along dimension {dim} do not give "
                f"each rank one; use a smaller tp"
            )
        if self.parts.setdefault(name, part) != part:
            raise PlanError(
                f"tp_plan: {name} is shared by several layers and cut along dimension {self.parts[name].dim} for one "
                f"and {dim} for another; cut them alike"
            )
        if sharers > 1:
            self._sharers[name] = index - index % sharers
        return part

    # ---- carrying out ------------------------------------------------------------------------------------------------

    def cut(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Reduce full parameters to this rank's slices, in place. On meta only the shapes change.

        Parameters stay the same objects in all modules. The memory of the full values is free on return.

        Args:
            parameters: Full name → full parameter.

        Returns:
            The same dict.
        """
        for name, parameter in parameters.items():
            part = self.parts.get(name)
            if part is not None:
                with torch.no_grad():
                    parameter.data = take(part, parameter.data)
                parameter.grad = None
        return parameters

    def attach(self) -> None:
        """Patch the forwards of the cut layers."""
        self._made.make(self._changes)
        for parent, inputs in self._parents:
            self._hooks.append(parent.register_forward_hook(inputs.hook(), always_call=True))

    def detach(self) -> None:
        """Restore the model's own forwards. Parameters stay cut."""
        self._made.undo()
        while self._hooks:
            self._hooks.pop().remove()


def _width(name: str, module: nn.Module) -> int:
    """Return the number of outputs of a layer."""
    weight: Any = module.weight
    return weight.shape[1] if isinstance(module, nn.Embedding) else weight.shape[outputs_dim(name, module)]
