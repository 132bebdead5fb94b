"""What a handle asks of its cluster: of one that it starts, and of one that it finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import speedlab.cluster.host_specs as host_specs
import speedlab.cluster.pretended as pretended
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.home import ClusterState
from speedlab.config.errors import more_in
from speedlab.network import LinkRate

BACKENDS = ("shared", "gloo")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """As `Cluster` has it; None, and the device 'auto', where whatever runs will do."""

    engines: int | None
    device: str
    backend: str | None
    link: LinkRate | None
    spec: host_specs.Spec | None
    timeout_seconds: float | None = None

    @classmethod
    def parse(
        cls,
        engines: int | None,
        device: str,
        backend: str | None,
        link: str | None,
        spec: host_specs.Spec | None,
        timeout_seconds: float | None = None,
    ) -> Wanted:
        """Raises ClusterError for what no cluster can be."""
        if timeout_seconds is not None and not 0 < timeout_seconds < math.inf:
            raise ClusterError(f"timeout_seconds is {timeout_seconds!r}; it is a number of seconds above 0")
        if backend not in (None, *BACKENDS):
            raise ClusterError(f"backend is {backend!r}; it is {' or '.join(map(repr, BACKENDS))}")
        parsed = pretended.parse(link, on_hosts=spec is not None)
        if spec is not None and engines is not None:
            raise ClusterError(
                f"engines is {engines}, and hosts say how many each has; leave it out, or write them as 'gpu-1:8'"
            )
        return cls(
            engines=engines, device=device, backend=backend, link=parsed, spec=spec, timeout_seconds=timeout_seconds
        )

    def require(self, state: ClusterState) -> None:
        """Raise ClusterError unless the cluster that runs is such a one."""
        name, size, kind = state.name, len(state.devices), state.devices[0].kind
        attach = f"speedlab.Cluster.attach({name!r})"
        what_to_do = f"use it as it is with {attach}, stop it first, or give the new one another name; "
        what_to_do += more_in("engines")
        if not host_specs.may_be(self.spec, state.hosts):
            raise ClusterError(
                f"cluster {name!r} runs on {', '.join(state.hosts) or 'this machine'}, and other hosts were asked "
                f"for; {what_to_do}"
            )
        if self.engines is not None and self.engines != size:
            raise ClusterError(
                f"cluster {name!r} runs with {size} engines, and {self.engines} were asked for; {what_to_do}"
            )
        if self.device not in ("auto", kind):
            raise ClusterError(f"cluster {name!r} runs on {kind}, and {self.device} was asked for; {what_to_do}")
        if self.backend not in (None, state.backend):
            raise ClusterError(
                f"the engines of cluster {name!r} reach each other through {state.backend!r}, and "
                f"{self.backend!r} was asked for; {what_to_do}"
            )
        if self.timeout_seconds is not None and self.timeout_seconds != state.timeout_seconds:
            limit = f"{state.timeout_seconds:g} s" if state.timeout_seconds else "the usual time"
            raise ClusterError(
                f"the engines of cluster {name!r} wait {limit} for each other, and {self.timeout_seconds:g} s were "
                f"asked for; {what_to_do}"
            )
        if self.link is not None and str(self.link) != state.link:
            raise ClusterError(
                f"the engines of cluster {name!r} {pretended.words(state.link) or 'pretend no link'}, and "
                f"{self.link} was asked for; {what_to_do}"
            )
