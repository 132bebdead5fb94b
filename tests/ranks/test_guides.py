"""Python of README and of the guides does what it says: scripts after the change train as the plain loop does."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_blocks import README, ROOT, Block, blocks_of
from torch.utils.data import Dataset

from ranks.conftest import PoolOf
from ranks.pool import Pool

PAGE = ROOT / "speedlab/guides/how-to/script.md"
OWN_MODEL = ROOT / "speedlab/guides/how-to/own-model-and-data.md"
PLAIN_TORCH = ROOT / "speedlab/guides/how-to/plain-torch.md"
FINE_TUNE = ROOT / "speedlab/guides/tutorials/fine-tune.md"
BLOCKS = blocks_of(PAGE)
AFTER = [block for block in BLOCKS if block.before == "After:"]
STEPS = 10
PLAIN_BATCHES = "batch_size=8, shuffle=True"


def the(heading: str, before: str, language: str = "python") -> Block:
    (found,) = (b for b in BLOCKS if b.heading == heading and b.language == language and b.before.startswith(before))
    return found


class Recorded(Dataset):
    """The page's data; `order` is which rows were asked for."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        self.order.append(int(row))
        return self.data[row]


def run_script(code: str, folder: Path, **names: Any) -> tuple[list[float], list[int]]:
    """Run a script of the page beside its `my_model.py` and `ds_config.json`; its losses, and the rows it read."""
    module = types.ModuleType("my_model")
    exec(the("From a script to SpeedLab", "All scripts").code, module.__dict__)
    module.dataset = data = Recorded(module.dataset)
    names["__name__"] = "__main__"
    # In float64, where no order of a sum can be seen.
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "my_model", module)
        patch.chdir(folder)
        try:
            exec(compile(code, str(PAGE), "exec"), names)
        finally:
            torch.set_default_dtype(torch.float32)
    if "engine" in names:
        names["engine"].destroy()
    return names["losses"], data.order


@pytest.mark.parametrize("block", AFTER, ids=lambda block: block.heading)
def test_a_script_moved_over_trains_as_the_plain_loop(block: Block, two: Pool, pool_of: PoolOf, tmp_path) -> None:
    (tmp_path / "ds_config.json").write_text(the("From DeepSpeed", "The file stays", "json").code)
    losses, orders = zip(*two.run(run_script, block.code, tmp_path), strict=True)
    by_micro_batch = [sum(each) / two.size for each in zip(*losses, strict=True)]
    found = [sum(part) / len(part) for part in _parts(by_micro_batch, STEPS)]

    # The plain loop over the same batches: of each step the rows that both ranks read.
    batches = [list(chain(*parts)) for parts in zip(*(_parts(order, STEPS) for order in orders), strict=True)]
    assert sorted(row for batch in batches for row in batch) == list(range(80))
    before = the("From a plain loop", "Before").code
    assert PLAIN_BATCHES in before
    plain = before.replace(PLAIN_BATCHES, "batch_sampler=batches")
    ((expected, _),) = pool_of(1).run(run_script, plain, tmp_path, batches=batches)
    # The optimizer of a file has float32 masters, and Adam divides small gradients, with their rounding, by their size.
    allowed = 1e-9 if "optimizer=" in block.code else 1e-4
    assert found == pytest.approx(expected, rel=allowed)
    assert found[-1] < found[0]


def _parts(items: list[Any], count: int) -> list[list[Any]]:
    size, rest = divmod(len(items), count)
    assert rest == 0
    return [items[i : i + size] for i in range(0, len(items), size)]


def test_there_is_one_for_each_way_to_train() -> None:
    assert [block.heading for block in AFTER] == [
        "From a plain loop",
        "From DistributedDataParallel",
        "From DeepSpeed",
        "From Accelerate",
    ]
    for block in (block for block in BLOCKS if block.language == "python"):
        compile(block.code, str(PAGE), "exec")


def python_in(page: Path, word: str = "") -> list[str]:
    return [block.code for block in blocks_of(page) if block.language == "python" and word in block.code]


def small_llama() -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, use_cache=False, **sizes))


def run_own_loops() -> list[str]:
    """Run the loops of the page about own models, one after the other; return what each has trained."""
    own, hugging_face, _ = python_in(OWN_MODEL, "engine")
    module: dict[str, Any] = {}
    exec(the("From a script to SpeedLab", "All scripts").code, module)
    names: dict[str, Any] = {"model": module["Model"](), "dataset": module["dataset"]}
    exec(own, names)
    trained = [f"{type(names['engine'].module).__name__} {names['engine'].global_step}"]
    names["engine"].destroy()

    rows = [{"input_ids": row, "labels": row} for row in module["text"]]
    # The call of `initialize` is the one above on the page, with this model.
    names |= {"model": small_llama(), "dataset": rows}
    exec(own.partition("for tokens")[0], names)
    exec(hugging_face, names)
    trained.append(f"{type(names['engine'].module).__name__} {names['engine'].global_step}")
    names["engine"].destroy()
    return trained


def run_step_under_every_layout() -> tuple[str, int, float]:
    import speedlab

    *_, pipeline = python_in(OWN_MODEL, "engine")
    tokens = torch.arange(4 * 2 * 16).view(4, 2, 16) % 64
    names = {"speedlab": speedlab, "model": small_llama(), "micro_batches": [(each, each) for each in tokens]}
    exec(pipeline, names)
    engine = names["engine"]
    result = str(engine.layout), engine.global_step, float(names["loss"])
    engine.destroy()
    return result


def run_fine_tuning(page: Path, folder: Path) -> tuple[int, str]:
    """Run the script of a page in `folder`, which has the model; return the steps and what the script printed."""
    (code,) = python_in(page, "from_pretrained")
    rows = (torch.arange(80)[:, None] + torch.arange(17)) % 64
    printed: list[str] = []
    names: dict[str, Any] = {
        "dataset": [{"input_ids": row, "labels": row} for row in rows],
        "print": lambda text: printed.append(str(text)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, names)
    steps = names["engine"].global_step
    names["engine"].destroy()
    return steps, "\n".join(printed)


def test_loops_of_ones_own_train(two: Pool) -> None:
    # 80 rows, two ranks, micro-batches of 8.
    assert two.run(run_own_loops, timeout=120) == [["Model 5", "LlamaForCausalLM 5"]] * 2


def test_a_step_under_every_layout(pool_of: PoolOf) -> None:
    results = pool_of(4).run(run_step_under_every_layout, timeout=120)
    assert {(layout, steps) for layout, steps, _ in results} == {("pp 2 × dp 1 × tp 2", 1)}
    (loss,) = {loss for *_, loss in results}
    assert loss == pytest.approx(4.16, abs=0.2)  # About log 64: nothing is learned yet.


@pytest.mark.parametrize("page", [README, FINE_TUNE], ids=lambda page: page.stem)
def test_fine_tuning_trains_and_exports(page: Path, two: Pool, tmp_path: Path) -> None:
    import transformers

    small_llama().save_pretrained(tmp_path / "path/to/model")
    (steps, printed), *_ = two.run(run_fine_tuning, page, tmp_path, timeout=120)
    # 80 rows, two ranks, micro-batches of 2.
    assert steps == 20
    assert ("counted" in printed) == (page == FINE_TUNE)
    assert (tmp_path / "checkpoints").is_dir() == (page == FINE_TUNE)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")
    before = dict(small_llama().named_parameters())
    assert all(not torch.equal(p, before[name]) for name, p in tuned.named_parameters())


def test_the_backend_for_plain_torch() -> None:
    (code,) = python_in(PLAIN_TORCH)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(torch.distributed.get_backend())"],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.stdout.split() == ["shared"], shown.stderr


def run_proofs_page() -> tuple[str, int]:
    (block,) = blocks_of(ROOT / "speedlab/guides/concepts/proof.md")
    names: dict[str, Any] = {"print": lambda text: None}
    exec(block.code, names)
    names["engine"].destroy()
    proof = names["proof"]
    return f"{proof['gradients'].severity}: {proof['gradients'].text}", len(proof.findings)


def test_the_page_about_proofs_shows_what_it_says(two: Pool) -> None:
    ((text, count), *others) = two.run(run_proofs_page)
    assert others == [(text, count)]
    assert text.startswith("suspicious: 2 of 5 trainable tensors got no gradient: unused.bias, unused.weight.")
    assert count == 8
