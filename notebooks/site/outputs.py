"""Run notebooks for the site, on this machine: `python notebooks/site/outputs.py [all]`, as `make docs` does.

1. Those in FEWER run, each in an empty folder, with the smaller numbers that stand there; with "all" the others, too,
   as they are. What a page shows without a kernel is kept in build/notebooks: pictures, tables and texts.
2. A notebook whose outputs are there, of these cells and numbers, is not run again until `make clean`.
3. build.py takes a notebook with its outputs, if it has any, and with a line that says where they are from.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build/notebooks"
FEWER: dict[str, dict[str, str]] = {
    "01_quickstart": {"STEPS_PER_STAGE = 50": "STEPS_PER_STAGE = 10"},
    "02_planning_a_trillion_parameters": {},
    "06_zero_seen": {"--engines 4": "--engines 2", '"global_size": 4': '"global_size": 2', "STEPS = 12": "STEPS = 6"},
    "08_bring_your_own_model": {},
}
"""By notebook, what is written in the place of what while it runs for the site: under two minutes for all together."""
STILL = ("text/html", "image/svg+xml", "image/png", "text/plain")
"""What a page shows without a kernel and without a script."""
SECONDS_A_CELL = 300
DIGEST = "speedlab_outputs_of"
STOP = """
from speedlab.cluster import Cluster, ClusterError
try:
    Cluster.attach().stop()
except ClusterError:
    pass
"""


def main(*asked: str) -> None:
    """1 and 2. Raises nbclient's CellExecutionError where a cell raises."""
    for page in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if (page.stem in FEWER or "all" in asked) and not has_outputs(page):
            print(f"docs: {page.name} runs, for its outputs", flush=True)
            run(page)


def run(page: Path) -> None:
    """Keep the notebook with its outputs. The engines that it started end, whatever it did."""
    notebook = nbformat.read(page, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        for more, fewer in FEWER.get(page.stem, {}).items():
            cell.source = cell.source.replace(more, fewer)
    with tempfile.TemporaryDirectory(prefix="speedlab-docs-", ignore_cleanup_errors=True) as folder:
        own = {"IPYTHONDIR": f"{folder}/ipython", "JUPYTER_RUNTIME_DIR": f"{folder}/runtime"}
        environment = {**os.environ, **own}
        client = NotebookClient(
            notebook,
            timeout=SECONDS_A_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],
        )
        try:
            client.execute(env=environment)
        finally:
            subprocess.run([sys.executable, "-c", STOP], cwd=folder, env=environment, timeout=120, check=True)
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := still(output))]
    notebook.metadata.pop("widgets", None)
    notebook.metadata[DIGEST] = _digest(page)
    KEPT.mkdir(parents=True, exist_ok=True)
    # Where it ran is nobody's business.
    (KEPT / page.name).write_text(nbformat.writes(notebook).replace(folder, "~"), encoding="utf-8")


def still(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """What of an output a page shows; None where that is nothing."""
    if "data" in output:
        output["data"] = {kind: output["data"][kind] for kind in STILL if kind in output["data"]}
        return output if output["data"] else None
    return output


def has_outputs(page: Path) -> bool:
    """Whether outputs of the notebook as it is now are kept."""
    kept = KEPT / page.name
    return kept.exists() and nbformat.read(kept, as_version=4).metadata.get(DIGEST) == _digest(page)


def shown(page: Path) -> str:
    """3. As JSON text."""
    ran = has_outputs(page)
    notebook = nbformat.read(KEPT / page.name if ran else page, as_version=4)
    note = nbformat.v4.new_markdown_cell(f"```{{note}}\n{_note(page.stem, ran=ran)}\n```", id="where-outputs-are-from")
    notebook.cells.insert(1, note)
    return nbformat.writes(notebook)


def _note(stem: str, *, ran: bool) -> str:
    if not ran:
        return "This notebook computes for minutes, and its outputs are not here: run it in JupyterLab to see them."
    fewer = FEWER.get(stem, {})
    places = ", ".join(f"`{short}` in the place of `{long}`" for long, short in fewer.items())
    return f"The outputs are those of a machine with {os.cpu_count()} CPU cores{places and f', with {places}'}."


def _digest(page: Path) -> str:
    reported = page.read_bytes() + repr(FEWER.get(page.stem)).encode()
    return hashlib.sha256(reported).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
