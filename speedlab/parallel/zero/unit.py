"""A unit, and the passes in which units come and go."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from speedlab.comm import PeerLost
from speedlab.offload import OffloadError
from speedlab.parallel.zero.flat import Flat
from speedlab.parallel.zero.ways import ReadThenGathered, Waited


class Pass(Enum):
    """What the module is doing; decides in which order units are gathered and whether they are released after a
    forward."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Watch(Protocol):
    """Who looks at the values of units while these are here."""

    def came(self, unit: Unit) -> None: ...

    def goes(self, unit: Unit) -> None: ...


class Unit:
    """Parameters that are gathered and released together."""

    def __init__(self, name: str, modules: list[nn.Module], flats: list[Flat]) -> None:
        self.name, self.modules, self.flats = name, modules, flats
        self.trainable_count = sum(len(flat.parameters) for flat in flats if flat.trainable)
        self.gathers: list[Waited] | None = None
        """The gather under way; None when the unit is released, [] when its parameters are there."""
        self.cut_off = False
        """Whether a wait for the gather under way has failed: its transfers are not waited for again, and the memory
        that they fill stays until `forget_gather`."""
        self.missing = self.trainable_count
        """Gradients that this backward pass has not produced yet."""
        self.gradients = [flat.gradient for flat in flats if flat.gradient is not None]
        self.calls = 0
        """How many forwards of its modules are running, one inside the other; while there is one, its parts need no
        care of their own."""
        self.open_calls: list[RemovableHandle] = []
        """Hooks on calls whose input gradients are still to come; kept where frozen parameters are needed to the
        end."""
        self.has_frozen = any(not flat.trainable for flat in flats)
        self.watch: Watch | None = None

    def start_gather(self) -> None:
        if self.gathers is not None:
            return
        begun: list[Waited] = []
        try:
            for flat in self.flats:
                begun.append(flat.gather())
        except BaseException:  # All are gathered, or none is.
            for flat, pending in zip(self.flats, begun, strict=False):
                with suppress(Exception):  # What was raised first is what counts.
                    pending.wait()
                flat.release()
            raise
        self.gathers = begun

    def finish_gather(self) -> None:
        """Raises OffloadError where this rank's part cannot be read; nothing of the unit is under way then. Raises
        PeerLost where an earlier wait has failed: its error was raised then, and may be of another world."""
        if self.cut_off:
            raise PeerLost(f"the gather of {self.name} was cut off; the ranks have to meet again (engine.reconnect)")
        arriving = self.gathers or ()
        try:
            for pending in arriving:
                pending.wait()
        except OffloadError:
            self.forget_gather()
            raise
        except BaseException:
            self.cut_off = True
            raise
        self.gathers = []
        if arriving and self.watch is not None:
            self.watch.came(self)

    def release(self) -> None:
        self.calls = 0
        if self.gathers is not None:
            self.finish_gather()
            if self.watch is not None:
                self.watch.goes(self)
            for flat in self.flats:
                flat.release()
            self.gathers = None

    def forget_gather(self) -> None:
        """Nothing comes from peers any more. What this rank reads itself does, and has to be over before its memory
        serves others."""
        for pending in self.gathers or ():
            if isinstance(pending, ReadThenGathered):
                with suppress(OffloadError):  # Whoever needs the values is told.
                    pending.reading.wait()
            del pending  # A transfer that is gone writes nothing into the memory that is freed now.
        if self.gathers is not None:
            self.gathers, self.cut_off = [], False
            self.release()

    def forget_calls(self) -> None:
        """No gradients will come for the calls that are open. (A hook on several tensors holds their graph, which holds
        the hook, where no garbage collector sees it.)"""
        for handle in self.open_calls:
            handle.remove()
        self.open_calls.clear()

    def __repr__(self) -> str:
        return f"Unit({self.name}, {sum(flat.numel for flat in self.flats):,} parameters)"
