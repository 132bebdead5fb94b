"""The scripts of `speedlab guide script` do what it says: each one after the change trains as the plain loop does."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from markdown_blocks import ROOT, Block, blocks_of

from ranks.pool import Pool

PAGE = ROOT / "speedlab/guides/script.md"
BLOCKS = blocks_of(PAGE)
AFTER = [block for block in BLOCKS if block.before == "After:"]
STEPS = 10


def the(heading: str, before: str, language: str = "python") -> Block:
    (found,) = (b for b in BLOCKS if b.heading == heading and b.language == language and b.before.startswith(before))
    return found


def run_script(code: str, folder: Path) -> list[float]:
    """Run a script of the page beside its `my_model.py` and `ds_config.json`; returns its losses."""
    made = types.ModuleType("my_model")
    exec(the("From a script to SpeedLab", "All scripts").code, made.__dict__)
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "my_model", made)
        patch.chdir(folder)
        exec(compile(code, str(PAGE), "exec"), names)
    if "engine" in names:
        names["engine"].destroy()
    return names["losses"]


@pytest.fixture(scope="module")
def plain(pool_of, tmp_path_factory) -> list[float]:
    """The plain loop's losses, over the data in the order in which all samplers of seed 0 have it."""
    code = the("From a plain loop", "Before").code
    order = "sampler=torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)"
    assert "shuffle=True" in code
    (losses,) = pool_of(1).run(run_script, code.replace("shuffle=True", order), tmp_path_factory.mktemp("plain"))
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize("block", AFTER, ids=lambda block: block.heading)
def test_a_script_moved_over_trains_as_the_plain_loop(block: Block, two: Pool, plain: list[float], tmp_path) -> None:
    (tmp_path / "ds_config.json").write_text(the("From DeepSpeed", "The file stays", "json").code)
    by_rank = two.run(run_script, block.code, tmp_path)
    means = [sum(losses) / two.size for losses in zip(*by_rank, strict=True)]
    micro_batches = len(means) // STEPS
    steps = [sum(means[i : i + micro_batches]) / micro_batches for i in range(0, len(means), micro_batches)]
    assert steps == pytest.approx(plain, rel=1e-5)


def test_there_is_one_for_each_way_to_train() -> None:
    assert [block.heading for block in AFTER] == [
        "From a plain loop",
        "From DistributedDataParallel",
        "From DeepSpeed",
        "From Accelerate",
    ]
    for block in (block for block in BLOCKS if block.language == "python"):
        compile(block.code, str(PAGE), "exec")
