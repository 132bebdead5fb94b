"""States away from a real GPU: what is written from it is read back, behind what the current stream does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speedlab.comm import CommStats
from speedlab.offload import DiskStore, HostStore, StateStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA device"),
]

STORES: dict[str, Callable[[Path, torch.device], StateStore]] = {
    "host": lambda folder, device: HostStore(CommStats(), device),
    "disk": lambda folder, device: DiskStore(folder, rank=0, traffic=CommStats(), device=device),
}


@pytest.mark.parametrize("make", STORES.values(), ids=STORES.keys())
@pytest.mark.parametrize("numel", [1, 1_000_003])
def test_device_tensors_go_and_come(make: Callable[..., StateStore], numel: int, tmp_path: Path) -> None:
    device = torch.device("cuda")
    store = make(tmp_path, device)
    try:
        kept = store.keep(numel, torch.float32)
        values = torch.randn(numel, device=device)
        for _ in range(3):
            values = values * 2 + 1  # Not over when the copy is started.
            kept.write(values)
            kept.fetch().wait()
            assert kept.tensor.equal(values.cpu())
            kept.tensor.neg_()
            kept.leave(changed=True)
            into = torch.empty_like(values)
            kept.read(into).wait()
            assert into.equal(-values)
        half = torch.zeros(numel // 2 + 1, device=device)
        kept.write(half, numel - half.numel()).wait()
        kept.read(into).wait()
        assert not into[numel - half.numel() :].any()
        assert into[: numel - half.numel()].equal(-values[: numel - half.numel()])
    finally:
        store.close()
