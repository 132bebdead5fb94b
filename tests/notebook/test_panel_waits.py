"""A panel hears its page while a cell waits for a run: messages come over a subshell of the kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

SECONDS = 60.0

PANEL = """
from speedlab_notebook.panel.panel import Panel
panel = Panel()
control = panel.fields["zero.stage"].control
print(control.comm.comm_id)
"""
WAIT = """
import time
until = time.monotonic() + 30  # As run.wait_until does: looks, and sleeps between two looks.
while not panel.effect_text and time.monotonic() < until:
    time.sleep(0.01)
print(panel.config.zero.stage, panel.effect_text)
panel.close()
"""


@pytest.fixture
def kernel() -> Iterator[BlockingKernelClient]:
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=SECONDS)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def printed(client: BlockingKernelClient, sent: str) -> str:
    """What the cell with this message id prints, until it is done."""
    text, until = "", time.monotonic() + SECONDS
    while time.monotonic() < until:
        message: Any = client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "stream":
            text += message["content"]["text"]
        assert message["msg_type"] != "error", message["content"]["traceback"]
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return text
    raise TimeoutError(text)


def wait_until_busy(client: BlockingKernelClient, sent: str) -> None:
    while True:
        message: Any = client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") == sent and message["msg_type"] == "execute_input":
            return


@pytest.mark.timeout(120)
def test_a_control_is_heard_while_a_cell_waits(kernel: BlockingKernelClient) -> None:
    comm = printed(kernel, kernel.execute(PANEL)).split()[-1]
    # JupyterLab 4.4 and later ask for a subshell, one for all widgets, and send what a person does there.
    kernel.control_channel.send(kernel.session.msg("create_subshell_request", {}))
    subshell = kernel.get_control_msg(timeout=SECONDS)["content"]["subshell_id"]
    waiting = kernel.execute(WAIT)
    wait_until_busy(kernel, waiting)
    data = {"method": "update", "state": {"index": 3}, "buffer_paths": []}  # The first click ever.
    click = kernel.session.msg("comm_msg", {"comm_id": comm, "data": data})
    click["header"]["subshell_id"] = subshell
    kernel.shell_channel.send(click)
    stage, reported = printed(kernel, waiting).split(" ", 1)
    assert stage == "3"
    assert reported.startswith("a rank holds ")
