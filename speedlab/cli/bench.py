"""Run the benchmarks of this machine: `speedlab bench NAME`."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping


def bench(argv: list[str]) -> int:
    """Run a benchmark.

    Args:
        argv: name of the benchmark, then its own arguments.

    Returns:
        The exit status: 0 done, 2 no name, or an unknown one.
    """
    from speedlab.bench import BENCHES

    status = run_benchmark("speedlab bench", {"speedlab.bench": BENCHES}, argv)
    if status == 2:
        print("Comparisons with peers are in the repository: make bench NAME=step", file=sys.stderr)
    return status


def run_benchmark(command: str, packages: Mapping[str, Mapping[str, str]], argv: list[str]) -> int:
    """Run the module `argv[0]` of one of the packages.

    Args:
        command: how the benchmark was called, for usage and errors.
        packages: the benchmarks of each package, with a description each.
        argv: the name of the benchmark, then arguments of its own.

    Returns:
        The exit status: 0 done, 2 an unknown name, or no name.
    """
    benches = {name: (package, text) for package, names in packages.items() for name, text in names.items()}
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, benches))
        print(f"usage: {command} NAME [--json FILE] [options]\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in benches.items()))
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in benches:
        near = difflib.get_close_matches(name, benches, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"benchmarks: {', '.join(benches)}"
        print(f"{command}: unknown benchmark {name!r}; {hint}", file=sys.stderr)
        return 2
    importlib.import_module(f"{benches[name][0]}.{name}").main(rest)
    return 0
