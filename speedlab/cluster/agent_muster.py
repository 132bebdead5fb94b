"""Agents come: they are launched, register with the controller, and say what their hosts have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ipyparallel

import speedlab.cluster.agent_tasks as agent_tasks
from speedlab.cluster.agent import Order, own_versions
from speedlab.cluster.agent_calls import AgentEntry, Calls, HostLost
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.home import Home, this_host
from speedlab.cluster.hosts import Host
from speedlab.cluster.launching import Launching
from speedlab.cluster.roll_call import Register
from speedlab.hardware import Device
from speedlab.network import Endpoint

REGISTER_SECONDS = 60.0
"""How long agents may take from the start of their process until they have registered."""

_POLL_SECONDS = 0.02


class Muster:
    """Brings the agents of one cluster together. `device` and `interface` as `start_agents` takes them."""

    def __init__(
        self,
        home: Home,
        client: ipyparallel.Client,
        launching: Launching,
        token: str,
        device: str,
        interface: str,
    ) -> None:
        self.launching, self.device, self.interface = launching, device, interface
        self.calls = Calls(client)
        self.came: dict[str, int] = {}
        """ipyparallel's number of the agent that came last, by host."""
        self._home, self._register, self._token = home, Register(client), token
        self._known = self._register.ids()
        """Numbers that were there before, or were asked who they are."""

    def order(self) -> Order:
        """What an agent is told."""
        connection = json.loads(self._home.connection_file("engine").read_text())
        address = connection["interface"].partition("://")[2]
        return Order(
            cluster=self._home.name,
            token=self._token,
            connection=connection,
            controller=str(Endpoint(host=this_host(), address=address, port=connection["registration"])),
            expected=own_versions(),
            device=self.device,
        )

    def first(self, progress: Callable[[str], None], cancelled: threading.Event) -> tuple[AgentEntry, ...]:
        """Launch all; returns when every one has come and has said what its host has, in the order of ranks."""
        self.launching.start(self.order())
        names = self.launching.names
        came = self._await(self.launching.count, progress, cancelled)
        came.sort(key=lambda who: names.index(who["host"]) if who["host"] in names else who["number"])
        entries, wrong = [], []
        for number, who in enumerate(came):
            try:
                entries.append(self._describe(who, self.launching.engines_of(number)))
            except ClusterError as error:
                wrong.append(str(error))
        if wrong:
            raise ClusterError("\n".join(wrong))
        check_equal([entry.host for entry in entries], [self.launching.engines_of(k) for k in range(len(entries))])
        return tuple(entries)

    def again(self, host: str, engines: int) -> AgentEntry:
        """Launch the agent of one host once more. Raises ClusterError where it does not come."""
        self.forget_new()
        self.launching.again(host, self.order())
        deadline = time.monotonic() + REGISTER_SECONDS
        while not (came := [who for who in self.new(strays=True) if who["host"] == host]):
            self.launching.progress()
            if time.monotonic() > deadline:
                late = f"{host} did not come back within {REGISTER_SECONDS:g} s"
                raise ClusterError("\n".join(filter(None, [late, self.launching.said()])))
            time.sleep(_POLL_SECONDS)
        return self._describe(came[0], engines)

    def forget_new(self) -> None:
        """Who has registered until now is no agent that is waited for."""
        self._known |= self._register.ids()

    def new_ids(self) -> set[int]:
        """Numbers that have registered since they were last asked for."""
        found = self._register.ids() - self._known
        self._known |= found
        return found

    def new(self, *, strays: bool) -> list[dict[str, Any]]:
        """The agents among these, as `agent_tasks.who` describes them, with `engine_id`. `strays`: there may be engines
        of a supervisor before, which are ending; what does not answer is then asked again as long as it is there. Else
        raises HostLost for it."""
        found = []
        for engine_id in sorted(self.new_ids()):
            try:
                who = self.calls.ask(engine_id, f"engine {engine_id}", agent_tasks.who)
            except HostLost:
                if not strays:
                    raise
                self._known.discard(engine_id)
                continue
            if who["agent"]:
                self.came[who["host"]] = engine_id
                found.append({**who, "engine_id": engine_id})
        return found

    def _await(self, count: int, progress: Callable[[str], None], cancelled: threading.Event) -> list[dict[str, Any]]:
        came: list[dict[str, Any]] = []
        deadline = time.monotonic() + REGISTER_SECONDS
        said = ""
        while len(came) < count:
            if cancelled.is_set():
                raise ClusterError("the start of the cluster was cancelled; nothing is left of it")
            words = self.launching.progress()
            if words != said:
                progress(words)
                said = words
            if words:  # A queue takes its time.
                deadline = time.monotonic() + REGISTER_SECONDS
            if time.monotonic() > deadline:
                there = {who["host"] for who in came}
                absent = [name for name in self.launching.names if name not in there]
                raise ClusterError(
                    f"only {len(came)} of {count} agents came within {REGISTER_SECONDS:g} s"
                    + (f"; none of {', '.join(absent)}" if absent else "")
                )
            came += self.new(strays=False)
            time.sleep(_POLL_SECONDS)
        return came

    def _describe(self, who: dict[str, Any], engines: int | None) -> AgentEntry:
        asked = (engines, self.device, self.interface)
        found = self.calls.ask(who["engine_id"], who["host"], agent_tasks.describe, *asked)
        if found["problem"]:
            raise ClusterError(f"{who['host']}: {found['problem']}")
        devices = tuple(Device(**{**each, "cores": tuple(each["cores"])}) for each in found["devices"])
        host = Host(name=who["host"], address=found["address"], interface=found["interface"], devices=devices)
        return AgentEntry(
            host=host,
            engine_id=who["engine_id"],
            pid=who["pid"],
            rendezvous=found["rendezvous"],
            folder=found["folder"],
        )


def check_equal(hosts: Sequence[Host], asked: Sequence[int | None]) -> None:
    """Raise ClusterError where hosts have different numbers of devices and nobody has said how many each gives: ranks
    of tensor parallelism share a host."""
    counts = {len(host.devices) for host in hosts}
    if len(counts) > 1 and None in asked:
        what = ", ".join(f"{host.name} has {len(host.devices)}" for host in hosts)
        fewest = min(counts)
        raise ClusterError(
            f"hosts have different numbers of devices: {what}. Say how many each gives, as "
            f"{[f'{host.name}:{fewest}' for host in hosts]}"
        )
