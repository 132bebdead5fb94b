"""`python -m tests.benchmarks NAME`: run a benchmark of the repository, or one that `speedlab bench` has."""

from __future__ import annotations

import sys

import speedlab.bench
from speedlab.cli.bench import run_benchmark
from tests.benchmarks import BENCHES

if __name__ == "__main__":
    packages = {"tests.benchmarks": BENCHES, "speedlab.bench": speedlab.bench.BENCHES}
    sys.exit(run_benchmark("python -m tests.benchmarks", packages, sys.argv[1:]))
