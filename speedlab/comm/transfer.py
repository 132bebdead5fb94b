"""Whatever moves a flat, a piece of one or a message: started, waited for once, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speedlab.comm.errors import PeerLost, clear_frames, without_frames
from speedlab.comm.traffic import Traffic


class Transfer:
    """Bytes under way. When `wait` has returned, its result is where it was asked for.

    On a GPU `wait` holds back the stream that is current then, not the host.
    """

    def __init__(
        self,
        finish: Callable[[], Any] | None,
        traffic: Traffic,
        device: torch.device,
        *,
        name: str = "",
        link: str = "",
        nbytes: int = 0,
        stream: torch.cuda.Stream | None = None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """It has been started: its bytes are counted now.

        `finish`: what is left of it; None when nothing is. `device`: where the waiting happens, and so how it is timed.
        `name`: of the collective, `link`: what it goes through; `nbytes` this rank sends are counted under both.
        `stream`: the one on which its result is complete before later work; None on CPUs. `over`: whether it has ended
        by itself already, where that can be told without waiting.
        """
        self.name, self.link, self.nbytes, self.stream = name, link, nbytes, stream
        self._finish, self._traffic, self._device, self._over = finish, traffic, device, over
        self._error: BaseException | None = None
        traffic.sent(name, link, nbytes)

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for, as far as can be told without waiting."""
        return self._finish is None or self._over()

    def cut(self) -> None:
        """This rank has left the world: nothing comes any more. What is under way holds connections, which close only
        when it is gone. (A GPU's are aborted, and its kernels may write until then.)"""
        if self._device.type != "cpu":
            return
        self._over = _is_over
        if self._finish is not None:
            self._finish = None
            self._error = PeerLost("this rank has left the world of ranks in which the transfer was started")

    def wait(self) -> None:
        """Wait until it is over. A second time there is nothing to wait for; one that failed fails again."""
        if self._error is not None:
            raise without_frames(self._error)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                self._traffic.waited(finish, self._device, self.link)
            except BaseException as error:
                finish, self._over = None, _is_over
                clear_frames(error)
                self._error = without_frames(error)
                raise


def _is_over() -> bool:
    return True
