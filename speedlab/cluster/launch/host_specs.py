"""Parse what the user says about hosts: names for SSH, a request to Slurm, or a host file for MPI.

parse(hosts=["gpu-1:8", "gpu-2:8"])
parse(slurm={"nodes": 4, "gpus_per_node": 8, "partition": "a100", "time": "8:00:00"})
parse(mpi={"hostfile": "hosts"})
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from speedlab.cluster.errors import ClusterError

_HOST = re.compile(r"(?P<place>([A-Za-z0-9_.-]+@)?[A-Za-z0-9][A-Za-z0-9_.-]*)(:(?P<engines>\d+))?")
_TIME = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}")


@dataclass(frozen=True, kw_only=True)
class SshHosts:
    """Hosts that the user reaches by ssh without a password.

    Attributes:
        names: Names as ssh accepts them.
        engines: Number of engines by host; None for one per device.
        config: File for `ssh -F`; "" for the default.
        python: Interpreter on the hosts; by default the path of this one.
    """

    names: tuple[str, ...]
    engines: tuple[int | None, ...]
    config: str = ""
    python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Resources of a Slurm job.

    `time` is in sbatch's format. `engines_per_node` is for nodes without GPUs. `options` are further arguments of
    sbatch, such as "--reservation=spring".
    """

    nodes: int
    gpus_per_node: int | None = None
    engines_per_node: int | None = None
    partition: str = ""
    time: str = ""
    account: str = ""
    qos: str = ""
    options: tuple[str, ...] = ()
    python: str = sys.executable

    @property
    def per_host(self) -> int | None:
        """Number of engines per node; None for one per device."""
        return self.gpus_per_node if self.engines_per_node is None else self.engines_per_node


@dataclass(frozen=True, kw_only=True)
class MpiHosts:
    """The hosts of an mpiexec host file: one name per line, with ':8' or 'slots=8' for the number of engines."""

    hostfile: str
    names: tuple[str, ...]
    engines: tuple[int | None, ...]
    python: str = sys.executable


Spec = SshHosts | SlurmJob | MpiHosts


def parse(
    hosts: Sequence[str] | SshHosts | None = None,
    slurm: Mapping[str, Any] | None = None,
    mpi: Mapping[str, Any] | None = None,
) -> Spec | None:
    """Return the hosts that the user asked for; None for this machine.

    Args:
        hosts: Names for SSH, such as 'gpu-1:8'.
        slurm: Fields of `SlurmJob`.
        mpi: Host file and interpreter for MPI.

    Raises:
        ClusterError: If more than one is given, or a key or value is not valid.
    """
    given = [name for name, value in (("hosts", hosts), ("slurm", slurm), ("mpi", mpi)) if value is not None]
    if len(given) > 1:
        raise ClusterError(f"{' and '.join(given)} were given; a cluster is started in one of these ways")
    if isinstance(hosts, SshHosts):
        return hosts
    if hosts is not None:
        return parse_hosts(hosts)
    if slurm is not None:
        return _parse_slurm(slurm)
    return _parse_mpi(mpi) if mpi is not None else None


def of_line(line: str) -> dict[str, Any]:
    """Return the arguments of `Cluster` for one line of text; {} for an empty line, which means this machine.

    Args:
        line: 'gpu-1:8, gpu-2:8', 'slurm nodes=4, gpus_per_node=8' or 'mpi HOSTFILE'.

    Raises:
        ClusterError: If the line is not valid.
    """
    return of_words(**words_of_line(line))


def words_of_line(line: str) -> dict[str, str]:
    """Return the arguments of `of_words` for one line of text.

    Raises:
        ClusterError: If nothing follows 'slurm' or 'mpi'.
    """
    way, _, rest = line.strip().partition(" ")
    if way in ("slurm", "mpi"):
        if not rest.strip():
            raise ClusterError(f"hosts: what follows {way!r} is missing; for instance {_EXAMPLES[way]!r}")
        return {way: rest.strip()}
    return {"hosts": line.strip()} if way else {}


_EXAMPLES = {"slurm": "slurm nodes=4, gpus_per_node=8", "mpi": "mpi hostfile"}


def may_be(spec: Spec | None, hosts: Sequence[str]) -> bool:
    """Return whether a running cluster can be the one that was asked for. It may have lost hosts, and Slurm chooses its
    own.

    Args:
        spec: Hosts that were asked for; None for any.
        hosts: Hosts of the running cluster; empty for one machine.
    """
    if spec is None:
        return True
    named = None if isinstance(spec, SlurmJob) else {name.rpartition("@")[2] for name in spec.names}
    return bool(hosts) and (named is None or {name.rpartition("@")[2] for name in hosts} <= named)


def engines_asked(spec: Spec) -> int | None:
    """Return the number of engines that a spec names.

    Args:
        spec: Hosts of the cluster.

    Returns:
        The number; None if it depends on the devices of the hosts.
    """
    counts = [spec.per_host] * spec.nodes if isinstance(spec, SlurmJob) else list(spec.engines)
    return None if None in counts else sum(count for count in counts if count is not None)


def of_words(hosts: str | None = None, slurm: str | None = None, mpi: str | None = None) -> dict[str, Any]:
    """Return the arguments of `Cluster` for command-line options.

    Args:
        hosts: 'gpu-1:8,gpu-2:8'.
        slurm: 'nodes=4,gpus_per_node=8'.
        mpi: Path of a host file.

    Raises:
        ClusterError: If a part is not valid.
    """
    given: dict[str, Any] = {}
    if hosts is not None:
        given["hosts"] = [part.strip() for part in hosts.split(",")]
    if slurm is not None:
        pairs = [part.partition("=") for part in slurm.split(",")]
        if wrong := [name for name, sign, _ in pairs if not sign]:
            raise ClusterError(
                f"slurm: {wrong[0]!r} has no value; each word is a name, '=' and a value, parted by commas"
            )
        given["slurm"] = {name.strip(): int(value) if value.isdigit() else value for name, _, value in pairs}
    if mpi is not None:
        given["mpi"] = {"hostfile": mpi}
    return given


def fields_of(spec: Spec) -> dict[str, Any]:
    """Return a spec as plain data for JSON."""
    return {"kind": type(spec).__name__, **asdict(spec)}


def of_fields(fields: Mapping[str, Any]) -> Spec:
    """Return the spec of `fields_of`; ignore unknown fields."""
    kind = {kind.__name__: kind for kind in (SshHosts, SlurmJob, MpiHosts)}[fields["kind"]]
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return kind(**{name: values[name] for name in kind.__dataclass_fields__ if name in values})


def parse_hosts(hosts: Sequence[str], *, config: str = "", python: str = sys.executable) -> SshHosts:
    """Return hosts for SSH.

    Args:
        hosts: Names as ssh accepts them: 'gpu-1:8', or 'me@gpu-2' for one engine per device.
        config: File for `ssh -F`.
        python: Interpreter on the hosts.

    Raises:
        ClusterError: If a name is not valid or occurs twice.
    """
    if isinstance(hosts, str):
        hosts = [part.strip() for part in hosts.split(",")]
    if not hosts:
        raise ClusterError("hosts is empty; name at least one, as ['gpu-1:8', 'gpu-2:8']")
    names, engines = _named([_split(text) for text in hosts])
    return SshHosts(names=names, engines=engines, config=config, python=python)


def _split(text: str) -> tuple[str, int | None]:
    match = _HOST.fullmatch(text)
    if match is None:
        raise ClusterError(f"hosts: {text!r} is no host; write 'name' or 'name:engines', as 'gpu-1:8' or 'me@gpu-1:8'")
    engines = match["engines"]
    if engines is not None and int(engines) < 1:
        raise ClusterError(f"hosts: {text!r} asks for no engine; leave the host out, or ask for at least 1")
    return match["place"], int(engines) if engines else None


def _named(pairs: Sequence[tuple[str, int | None]]) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ClusterError(f"hosts: {', '.join(twice)} named twice; give a host all its engines at once, as 'gpu-1:8'")
    return tuple(names), tuple(engines for _, engines in pairs)


def _parse_slurm(given: Mapping[str, Any]) -> SlurmJob:
    _known("slurm", given, SlurmJob, need="nodes")
    for name in ("nodes", "gpus_per_node", "engines_per_node"):
        value = given.get(name)
        if name in given and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ClusterError(f"slurm: {name} is {value!r}; it is a whole number, at least 1")
    time = str(given.get("time", ""))
    if time and not _TIME.fullmatch(time):
        raise ClusterError(f"slurm: time is {time!r}; sbatch takes '30' (minutes), '8:00:00' or '2-00:00:00'")
    options = given.get("options", ())
    if isinstance(options, str) or not all(str(word).startswith("-") for word in options):
        raise ClusterError(f"slurm: options is {options!r}; it is a list of words for sbatch, each with its dashes")
    for name in ("partition", "account", "qos"):
        if not re.fullmatch(r"[\w.,@-]*", str(given.get(name, ""))):
            raise ClusterError(f"slurm: {name} is {given[name]!r}; it is a name")
    return SlurmJob(**{**given, "time": time, "options": tuple(options)})


def _parse_mpi(given: Mapping[str, Any]) -> MpiHosts:
    _known("mpi", given, MpiHosts, need="hostfile", not_given=("names", "engines"))
    file = Path(given["hostfile"]).expanduser()
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise ClusterError(f"mpi: the host file {file} cannot be read ({error.strerror})") from None
    pairs = []
    for line in (line.partition("#")[0].split() for line in lines):
        if line:
            slots = next((word[6:] for word in line[1:] if word.startswith("slots=")), "")
            pairs.append(_split(f"{line[0]}:{slots}" if slots else line[0]))
    if not pairs:
        raise ClusterError(f"mpi: the host file {file} names no host; write one a line, as 'gpu-1:8'")
    names, engines = _named(pairs)
    python = given.get("python", sys.executable)
    return MpiHosts(hostfile=str(file.resolve()), names=names, engines=engines, python=python)


def _known(what: str, given: Mapping[str, Any], kind: type[Any], *, need: str, not_given: Sequence[str] = ()) -> None:
    names = [field.name for field in fields(kind) if field.name not in not_given]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ClusterError(f"{what}: {name!r} is not known; {hint}there are {', '.join(names)}")
    if need not in given:
        raise ClusterError(f"{what}: {need!r} is missing")
