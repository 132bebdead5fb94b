"""What every tier shares: how hypothesis draws examples, that Ctrl-C works, and where GPU tests run."""

from __future__ import annotations

import signal

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not cuda_devices():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
