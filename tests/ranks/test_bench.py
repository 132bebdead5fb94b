"""The processes of benchmarks: their allocator, whose code they import, and that both sides compute the same loss."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.pool import Pool
from speedlab.calibrate.rank_processes import KEPT_MEMORY, RankSet
from tests.benchmarks import contest, layouts, step

ROOT = Path(__file__).parents[2]


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"unused{number}", ctypes.c_size_t) for number in range(9)] + [("keepcost", ctypes.c_size_t)]


def kept_of_freed() -> int | None:
    """Bytes that the heap keeps at its end of 160 MiB that were taken in blocks of 16 and freed; None without glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype, library.malloc.restype = MallocInfo, ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    for block in [library.malloc(ctypes.c_size_t(16 << 20)) for _ in range(10)]:
        library.free(block)
    return library.mallinfo2().keepcost


def test_freed_memory_is_kept_where_the_environment_says_so() -> None:
    with RankSet(1, environment=KEPT_MEMORY) as kept, RankSet(1) as plain:
        most, least = kept.call(kept_of_freed), plain.call(kept_of_freed)
    if most is None:
        pytest.skip("another C library than glibc")
    assert most >= 160 << 20
    assert least < 32 << 20


# ---- another checkout ------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project with another version, in which the engine's folder has another name."""
    for name in ("speedlab", "cuda_ops"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "speedlab" / "engine").rename(tmp_path / "speedlab" / "machine")
    for file in (tmp_path / "speedlab").rglob("*.py"):
        file.write_text(file.read_text(encoding="utf-8").replace("speedlab.engine", "speedlab.machine"))
    start = tmp_path / "speedlab" / "__init__.py"
    start.write_text(start.read_text(encoding="utf-8") + '\n__version__ = "0.0.before"\n')
    return tmp_path


def sources() -> dict[str, str]:
    """Where this process has what it uses in a benchmark from."""
    import cuda_ops.adamw
    import speedlab
    from tests.benchmarks import ours

    modules = {"engine": speedlab.initialize, "kernels": cuda_ops.adamw.adamw, "bench": ours.build}
    files = {name: function.__code__.co_filename for name, function in modules.items() if name != "kernels"}
    return {"version": speedlab.__version__, "kernels": str(cuda_ops.adamw.__file__), **files}


def test_another_checkout_is_measured_by_this_ones_benchmark(checkout) -> None:
    with RankSet(1, project=checkout) as before:
        found = before.call(sources)
    assert found == {
        "version": "0.0.before",
        "kernels": str(checkout / "cuda_ops" / "adamw.py"),
        "engine": str(checkout / "speedlab" / "machine" / "initialize.py"),
        "bench": str(ROOT / "tests" / "benchmarks" / "ours.py"),
    }


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_both_versions_take_turns_in_one_run(checkout, capsys) -> None:
    """The whole of `bench step`, with what costs least."""
    arguments = ["--ranks", "1", "--rounds", "1", "--steps", "1", "--dtypes", "float32", "--only", "ours 0"]
    step.main([*arguments, "--against", str(checkout)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "step float32 1 ranks: ours 0",
        "step float32 1 ranks: before ours 0",
    ]


# ---- the same loss ---------------------------------------------------------------------------------------------------


def full_loss() -> tuple[list[Tensor], list[Tensor]]:
    """(loss, gradients of x and of this rank's rows) over parts of the vocabulary, and the same in one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    from tests.benchmarks.cut_loss import loss_of_head

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((2, 3, 8), (10, 8)))
    targets = torch.randint(0, 10, (2, 3), generator=generator)
    size, rank = dist.get_world_size(), dist.get_rank()
    own = weight.chunk(size)[rank].clone()
    inputs = x.clone().requires_grad_(), own.requires_grad_()
    loss_of = loss_of_head(init_device_mesh("cpu", (size,)))
    with loss_parallel():
        loss = loss_of(*inputs, targets)
        loss.backward()
    whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy((whole[0] @ whole[1].t()).flatten(0, 1), targets.flatten())
    expected.backward()
    found = [loss.detach(), *(each.grad for each in inputs)]
    return found, [expected.detach(), whole[0].grad, whole[1].grad.chunk(size)[rank]]  # type: ignore[union-attr]


def test_the_loss_of_cut_full_logits_is_that_of_one_process(two: Pool) -> None:
    for found, expected in two.run(full_loss):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_layouts_stand_beside_what_was_before_and_torch() -> None:
    assert layouts.peers_of("ours") == (f"{contest.BEFORE}ours", "torch")
    assert layouts.peers_of("torch") == ("limit",)
    assert layouts.peers_of("limit") == layouts.peers_of("before ours") == ("",)
