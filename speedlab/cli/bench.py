"""`speedlab bench NAME`: measurements beside the peers."""

from __future__ import annotations

import difflib
import importlib
import sys


def bench(argv: list[str]) -> int:
    """Run the benchmark `argv[0]`; the other arguments are its own."""
    from speedlab.bench import BENCHES

    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHES))
        print("usage: speedlab bench NAME [--json FILE] [options]\n")
        print("\n".join(f"  {name:<{width}}  {text}" for name, text in BENCHES.items()))
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"benchmarks: {', '.join(BENCHES)}"
        print(f"speedlab bench: unknown benchmark {name!r}; {hint}", file=sys.stderr)
        return 2
    importlib.import_module(f"speedlab.bench.{name}").main(rest)
    return 0
