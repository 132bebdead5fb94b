"""What every tier shares: how hypothesis draws examples, that Ctrl-C works, where the cache is, what may run at the
same time, and where GPU tests run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from speedlab.hardware import cuda_devices

# No deadline for an example, since times vary too much on shared machines; the same examples every time, so that what
# fails once fails again.
hypothesis.settings.register_profile("speedlab", deadline=None, derandomize=True)
hypothesis.settings.load_profile("speedlab")

# A shell that starts a job in the background (CI systems do) has it ignore SIGINT, and Python leaves it so: Ctrl-C,
# which some tests send, would do nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Not the user's: a machine that somebody calibrated predicts other times. It stays, since kernels compile for minutes.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "home")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that spin while they wait for others of a busy machine make tests take ten times as long.
    import torch

    torch.set_num_threads(1)

_KEEPS_CORES_BUSY = "tests/ranks/"
"""The tier whose tests compute on every core: two of them at a time would only slow each other down."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `make test`, which has two workers: one begins with the tier above, file after file, while the other takes
    what waits more than it computes (pages, clusters, hosts), file by file. Whoever is done first takes from the
    rest."""
    from xdist.scheduler import LoadScopeScheduling

    class ByTier(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _KEEPS_CORES_BUSY if nodeid.startswith(_KEEPS_CORES_BUSY) else nodeid.partition("::")[0]

    return ByTier(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not cuda_devices():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(autouse=True, scope="module")
def no_world_outlives_its_module() -> Iterator[None]:
    """The world of one which `initialize` has made in the process of the tests, where a module calls it there."""
    yield
    if "speedlab.comm" in sys.modules:
        sys.modules["speedlab.comm"].leave()


def pytest_collection_finish() -> None:
    """Modules and thousands of tests stay: collections look at none of them, and `initialize` collects each time."""
    gc.collect()
    gc.freeze()
