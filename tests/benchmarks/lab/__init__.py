"""A laboratory of hosts on one machine: network namespaces joined by a bridge, with real sshd, Slurm and mpiexec."""

from tests.benchmarks.lab.network import Lab, LabHost, missing_for_lab

__all__ = ["Lab", "LabHost", "missing_for_lab"]
