"""A model that is written in a notebook is trained by engines that know nothing of that notebook, and goes on when
another kernel resumes it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from speedlab.cluster import Cluster

MODULE = """
    import torch.nn.functional as F
    from torch import nn

    class Body(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embedding = nn.Embedding(512, width)

        def forward(self, tokens):
            return self.embedding(tokens)

    def cross_entropy(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""

BEGIN = """
    import os
    import pytest
    import torch
    import beside_the_notebook
    import speedlab
    from beside_the_notebook import Body
    from torch import nn

    cluster = speedlab.Cluster.attach("test-own")
    config = {
        "steps": 4,
        "data": {"source": "stdlib", "sequence_length": 32, "vocab_size": 512, "max_bytes": 200_000},
        "batch": {"global_size": 8, "micro_size": 2},
        "precision": "float32",
        "eval": {"every_steps": 0},
    }

    class Net(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.body = Body(width)
            self.scale = nn.Parameter(torch.full((width,), 0.5))
            self.head = nn.Linear(width, 512)

        def logits(self, tokens):
            return self.head(self.body(tokens) * self.scale)

        def forward(self, tokens, targets):
            return beside_the_notebook.cross_entropy(self.logits(tokens), targets)

    class Logits(Net):
        def forward(self, tokens):
            return self.logits(tokens)

    def losses(model, **given):
        run = cluster.train({**config, **given.pop("changes", {})}, model=model, **given)
        assert run.wait(60) == "finished"
        return [record.loss for record in run.records()]
"""

TRAINED = """
    from speedlab.config import RunConfig
    from speedlab.data import Sampler, prepare

    given = Net(8)
    found = losses(given, changes={"zero": 3})
    corpus = prepare(RunConfig(**config).data, progress=lambda *_: None)
    rows = torch.from_numpy(Sampler(corpus.train, 32, RunConfig(**config).seed).rows(0, 8, 0, 8))
    assert found[0] == pytest.approx(given(rows[:, :-1], rows[:, 1:]).item(), rel=1e-5)

    of_class = losses(Net)
    assert losses(lambda: Net(16)) == of_class
    of_function = lambda model, batch: beside_the_notebook.cross_entropy(model(batch[0]), batch[1])
    assert losses(Logits, loss=of_function) == of_class
    plan = {"head": "colwise_gather_output"}
    assert losses(Net, tp_plan=plan, changes={"parallel": {"tp": 2}}) == pytest.approx(of_class, rel=1e-5)
    with open("config.yaml", "w") as file:
        file.write(RunConfig(**config).to_json())
    run = cluster.train("config.yaml", model=Net)
    assert run.wait(60) == "finished" and [record.loss for record in run.records()] == of_class
    names = sorted(os.listdir("runs"))
"""

NEEDS_DEPTH = """
    class Deep(Net):
        def __init__(self, depth):
            super().__init__()

    cluster.train(config, model=Deep)
"""
REFUSED = {
    "cluster.train(config, model=Logits)": "ConfigError: model: Logits.forward(tokens) takes no targets",
    "net = Net(); net.log = open('log', 'w'); cluster.train(config, model=net)": (
        "ClusterError: model.log (a TextIOWrapper) cannot be sent to the engines"
    ),
    NEEDS_DEPTH: "ConfigError: model: Deep is called without arguments and needs depth",
    "cluster.train(config, model=lambda: Net(2**24))": (
        "ConfigError: model: with pp 1 × dp 2 × tp 1 at ZeRO stage 2, its 17,"
    ),
    "cluster.train({'stepz': 3}, model=Net)": "ConfigError: unknown key 'stepz'",
    "cluster.submit(lambda: cluster.size)": "ClusterError: cluster, which <lambda> uses (a Cluster) cannot be sent",
}
"""Cells, and how what IPython shows of them begins: the message, and no frame of ours."""

SUBMITTED = """
    assert sorted(os.listdir("runs")) == names

    factor = 3

    def scaled(number):
        global there
        there += 1
        return beside_the_notebook.__name__, number * factor + there

    cluster.execute("there = 10").result(20)
    assert cluster.submit(scaled, 2).result(20) == [("beside_the_notebook", 17)] * 2
    factor = 4
    assert cluster.submit(scaled, 2).result(20) == [("beside_the_notebook", 20)] * 2
    assert cluster.execute("there").result(20) == ["12"] * 2
"""

LEFT = """
    whole = losses(Net, changes={"name": "whole", "steps": 12})
    run = cluster.train({**config, "name": "left", "steps": 12, "zero": 1}, model=Net)
    run.pause().wait(60)
    run.advance(5 - run.step).wait(60)
    run.wait_until(5, 60)
    run.save().wait(60)
"""

RESUMED = """
    import pytest
    import speedlab

    run = speedlab.attach("left")
    whole = [record.loss for record in speedlab.attach("whole").records()]
    run.cluster.restart(1)
    assert run.reshape(zero=3).wait(60).kind == "reshaped"
    run.advance(2).wait(60)
    run.wait_until(7, 60)
    run.resume().wait(60)
    assert run.wait(60) == "finished"
    assert [record.loss for record in run.records()] == pytest.approx(whole, rel=1e-5)
    with pytest.raises(speedlab.RankError, match=r"left: to generate, Net.forward\\(tokens\\) has to give"):
        run.generate("a")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the notebooks are, beside a module of the user's; the cluster was started elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("own")
        patch.setenv("IPYTHONDIR", str(path / "ipython"))
        for kind in ("CONFIG", "DATA", "RUNTIME"):
            patch.setenv(f"JUPYTER_{kind}_DIR", str(path / kind.lower()))
        work = path / "work"
        work.mkdir()
        (work / "beside_the_notebook.py").write_text(textwrap.dedent(MODULE))
        cluster = Cluster(2, name="test-own", device="cpu")
        yield work
        cluster.stop()


def _run(folder: Path, *cells: str, refused: Collection[str] = ()) -> list[nbformat.NotebookNode]:
    """Execute cells in a new kernel; of those in `refused` an error is expected."""
    made = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    for cell, source in zip(made, cells, strict=True):
        cell.metadata["tags"] = ["raises-exception"] if source in refused else []
    notebook = nbformat.v4.new_notebook(cells=made)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=200, kernel_name="python3", resources=resources).execute()
    return notebook.cells


def test_a_model_of_the_notebook_is_trained_and_a_failed_try_leaves_nothing(folder: Path) -> None:
    cells = _run(folder, BEGIN, TRAINED, *REFUSED, SUBMITTED, LEFT, refused=REFUSED)
    for cell, complaint in zip(cells[2:], REFUSED.values(), strict=False):
        (error,) = [output for output in cell.outputs if output.output_type == "error"]
        shown = "\n".join(error.traceback)
        assert shown.startswith(complaint)
        assert "speedlab/" not in shown


def test_another_kernel_resumes_it_after_an_engine_was_restarted(folder: Path) -> None:
    _run(folder, RESUMED)
