"""Initialize parameters on `meta`, unit by unit, so that no rank ever holds the full model.

1. Parameters that `construct` freed: compute them again. They get the values of the plain constructor.
2. Parameters of a model that was built on `meta`: such values do not exist, so their modules initialize them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from speedlab.parallel.construction import Construction, give_value, seed_generators


class Materializer:
    """Initializes the parameters and buffers of a model that are on `meta`.

    The values do not depend on the layout: each module is initialized with a seed from its name.
    """

    def __init__(
        self, model: nn.Module, *, device: torch.device, seed: int, construction: Construction | None = None
    ) -> None:
        """Record which modules hold which parameters.

        Args:
            model: The model, possibly on meta.
            device: Device of the new tensors.
            seed: Base of all module seeds.
            construction: Record that can compute freed parameters again; None: there is none.
        """
        self.model, self.device, self.seed, self._construction = model, device, seed, construction
        self._holders: dict[int, list[tuple[str, nn.Module, str]]] = defaultdict(list)
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                self._holders[id(parameter)].append((name, module, key))

    def check(self) -> None:
        """Raise ValueError for a module on meta that cannot initialize itself."""
        for name, module in self.model.named_modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(tensor.device.type == "meta" for tensor in own):
                self._initialiser(name, module)

    def parameters(self, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return real parameters for those on meta. Recorded parameters get the values of the constructor. The modules
        initialize all others:

        1. Allocate memory; shared parameters stay shared.
        2. Call the reset method of every module that holds one of them, in the order of registration.
        3. If the model initializes its modules itself, call its method for the enclosing modules too, inner ones
           first. Hugging Face models scale residual projections in this way.

        Args:
            named: Full name → parameter.

        Returns:
            Full name → parameter with values.

        Raises:
            ValueError: A module cannot initialize itself, or leaves a tensor without values.
        """
        real: dict[str, nn.Parameter] = {}
        reset: set[int] = set()
        touched: dict[str, nn.Module] = {}
        for name, parameter in named.items():
            recorded = self._construction.value_of(parameter) if self._construction is not None else None
            if recorded is not None:
                give_value(parameter, recorded.to(self.device))
            if not parameter.is_meta:
                real[name] = parameter
                continue
            value = nn.Parameter(_unfilled(parameter, self.device), parameter.requires_grad)
            for holder_name, holder, key in self._holders[id(parameter)]:
                setattr(holder, key, value)
                touched[holder_name] = holder
            real[name] = value
            reset.add(id(value))
        self._reset(touched.items())
        by_model = self._by_model()
        if by_model is not None:
            for name, module in self._around(touched, reset):
                self._seeded(name, partial(by_model, module))
        _refuse_unfilled(
            {
                f"{name}.{key}" if name else key: value
                for name, module in touched.items()
                for key, value in itertools.chain(
                    module.named_parameters(recurse=False), module.named_buffers(recurse=False)
                )
            }
        )
        return real

    def _around(self, touched: dict[str, nn.Module], ids: set[int]) -> list[tuple[str, nn.Module]]:
        """Return the enclosing modules of those in `touched` whose parameters are all in `ids`, inner ones first."""
        outer = {name.rpartition(".")[0] for name in touched}
        for name in list(outer):
            while name:
                name = name.rpartition(".")[0]
                outer.add(name)
        around = [(name, self.model.get_submodule(name)) for name in outer - touched.keys()]
        whole = [(name, module) for name, module in around if all(id(p) in ids for p in module.parameters())]
        return sorted(whole, key=lambda item: (-item[0].count("."), item[0]))

    def buffers(self) -> None:
        """Allocate the buffers that are on meta, and let their modules fill them."""
        touched: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    persistent = key not in module._non_persistent_buffers_set
                    module.register_buffer(key, _unfilled(buffer, self.device), persistent=persistent)
                    if not any(True for _ in module.parameters(recurse=False)):
                        touched[name] = module
        self._reset(touched.items())

    def _reset(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for name, module in modules:
            for key, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    persistent = key not in module._non_persistent_buffers_set
                    module.register_buffer(key, _unfilled(buffer, self.device), persistent=persistent)
            self._seeded(name, self._initialiser(name, module))

    def _seeded(self, name: str, initialise: Callable[[], object]) -> None:
        """Run an initializer with the seed of its module's name. Keeps the caller's random state."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            seed_generators(_seed_of(self.seed, name), self.device)
            initialise()

    def _by_model(self) -> Callable[[nn.Module], object] | None:
        """Return the model's own initializer of modules, by the convention of Hugging Face; None if it has none."""
        method = getattr(self.model, "_init_weights", None)
        return method if callable(method) else None

    def _initialiser(self, name: str, module: nn.Module) -> Callable[[], object]:
        methods = [getattr(module, method, None) for method in ("reset_parameters", "_reset_parameters")]
        own = next((method for method in methods if callable(method)), None)
        by_model = self._by_model()
        if by_model is not None:
            # The model's initializer runs last and wins. It skips modules that it does not know, so the module's own
            # reset runs first.
            return lambda: (own() if own is not None else None, by_model(module))
        if own is not None:
            return own
        raise ValueError(
            f"{name or 'the model'} ({type(module).__name__}) was built on meta and has no reset_parameters(); "
            "give it one, or build the model with its values"
        )


def _unfilled(like: Tensor, device: torch.device) -> Tensor:
    """Return memory for a tensor on meta. Floats are NaN, so that missing values are detected later."""
    # Not empty_like: its Python implementation for meta tensors imports sympy.
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return made.fill_(math.nan) if made.is_floating_point() else made.zero_()


def _refuse_unfilled(named: dict[str, Tensor]) -> None:
    """Raise ValueError for a floating-point tensor that got no values."""
    for name, value in named.items():
        if value.is_floating_point() and math.isnan(value.sum().item()):  # One NaN element makes the sum NaN.
            raise ValueError(
                f"{name} got no value when its module was made: what __init__ writes is lost on meta; let "
                "reset_parameters() fill it, or build the model with its values"
            )


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "little")
