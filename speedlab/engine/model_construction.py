"""Make the user's model: a module, or the call of a function, with the values of a plain construction.

A plain construction is `torch.manual_seed(config.seed)` and then the call, in one process on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from speedlab.comm import Group, PeerLost
from speedlab.config import ConfigError
from speedlab.parallel import Construction, construct, seeded

ModelSource = nn.Module | Callable[[], nn.Module]


def make_everywhere(
    source: ModelSource, seed: int, device: torch.device, everyone: Group
) -> tuple[nn.Module, Construction | None]:
    """Make the module on all ranks. Collective.

    Args:
        source: A module, or a callable that makes one.
        seed: The configured seed.
        device: The device of this rank.
        everyone: All ranks.

    Returns:
        The module, and how to compute parameters left on `meta`.

    Raises:
        PeerLost: If the call failed on another rank; it names the rank and the cause. The failing rank raises its own
            error.
    """
    made, failed = None, None
    try:
        made = make(source, seed, device)
    except Exception as error:
        failed = error
    problems = everyone.collect("" if failed is None else f"{type(failed).__name__}: {failed}"[:1000])
    # The failing rank raises its own error, with its traceback.
    if failed is not None:
        raise failed
    for rank, problem in zip(everyone.ranks, problems, strict=True):
        if problem:
            raise PeerLost(f"model: {name_of(source)}() failed on rank {rank} ({problem}); it has to work on all ranks")
    assert made is not None  # Nothing was raised.
    return made


def make(source: ModelSource, seed: int, device: torch.device) -> tuple[nn.Module, Construction | None]:
    """Make the module on this rank, as `make_everywhere`.

    Args:
        source: A module, or a callable that makes one.
        seed: The configured seed.
        device: The device of this rank.

    Raises:
        ConfigError: For anything but a model.
    """
    if isinstance(source, nn.Module):
        return source, None
    check_callable(source)
    module, construction = construct(source, seed=seed, device=device)
    _check_made(source, module)
    return module, construction


def make_whole(source: ModelSource, seed: int) -> nn.Module:
    """Return the module with all values: `source` itself, or the result of the call.

    Args:
        source: A module, or a callable that makes one.
        seed: The configured seed.

    Raises:
        ConfigError: For anything but a model.
    """
    if isinstance(source, nn.Module):
        return source
    check_callable(source)
    with seeded(seed, torch.device("cpu")):
        module = source()
    _check_made(source, module)
    return module


def check_callable(source: Any) -> None:
    """Check that `source` can be called without arguments.

    Args:
        source: The user's model argument.

    Raises:
        ConfigError: If it cannot.
    """
    if not callable(source):
        raise ConfigError(
            f"model: it is a {type(source).__name__}; give a torch.nn.Module, or a function that makes one"
        )
    if needed := _arguments_needed(source):
        raise ConfigError(
            f"model: {name_of(source)} is called without arguments and needs {needed}; give a function that passes "
            f"them: model=lambda: {name_of(source)}(...)"
        )


def name_of(function: Any) -> str:
    """Return the name of a function or of its class.

    Args:
        function: A callable.
    """
    return getattr(function, "__name__", type(function).__name__)


def _check_made(source: Any, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model: {name_of(source)}() gave a {type(module).__name__}; it has to give a torch.nn.Module"
        )


def _arguments_needed(function: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # A builtin without a signature.
        return ""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in parameters if p.default is p.empty and p.kind not in several)
