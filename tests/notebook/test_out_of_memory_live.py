"""A rank that really runs out of memory: the system refuses it, and the run says who, for what, and what would fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from speedlab.cluster import Cluster, RankError
from speedlab.config import RunConfig

_LIMIT_RANK = """
import resource
from pathlib import Path
used = int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, ((used << 10) + (1 << 30), resource.RLIM_INFINITY))
"""
"""From now on the process gets a gibibyte more and not a byte beyond that."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path))
        patch.delenv("PYTEST_CURRENT_TEST")
        cluster = Cluster(2, name="test-memory", device="cpu")
    yield cluster
    cluster.stop()


@pytest.mark.timeout(180)
def test_the_rank_the_category_and_changes_that_fit_are_told(cluster: Cluster, tmp_path: Path) -> None:
    config = RunConfig(
        name="too-large",
        folder=tmp_path / "run",
        model={"layers": 2, "hidden": 512, "heads": 8, "ffn_hidden": 2048, "context": 256},
        data={"source": "stdlib", "sequence_length": 256, "tokenizer": "bytes", "max_bytes": 500_000},
        batch={"micro_size": 256},
        precision="float32",
        eval={"every_steps": 0},
        steps=3,
    )
    cluster.execute(_LIMIT_RANK, ranks=[1]).wait(30)
    run = cluster.train(config)
    with pytest.raises(RankError) as failed:
        run.wait(120)
    text = str(failed.value)
    # 65,536 tokens × 512 floats are 128 MiB, of which a block makes more than eight.
    reported = re.search(
        r"Out of memory on rank 1: (\d+(?:\.\d)?) MiB for activations in forward of blocks\.\d\S* did not fit", text
    )
    assert reported is not None, text
    assert float(reported[1]) in (128, 384, 512), (
        "of the hidden states, of queries, keys and values, or of the inner layer"
    )
    changes = text[text.index("Cheapest changes that fit:") :].splitlines()[1:4]
    assert len(changes) == 3
    assert any("micro-batch 256 →" in change for change in changes), changes
