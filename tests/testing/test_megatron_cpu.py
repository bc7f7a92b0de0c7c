"""Real Megatron-core trains on a CPU, and the harness leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim_tools.testing import cuda_means_cpu, measure_bytes
from tests.processes.rank_server import rank_server
from tests.testing import tiny_training as tiny

pytestmark = pytest.mark.filterwarnings("ignore")


# -- the torch-only part ---------------------------------------------------------------------


def test_cuda_means_cpu_and_leaves_no_trace(snapshot: Any) -> None:
    before = snapshot()
    with cuda_means_cpu():
        for device in ("cuda", "cuda:3", torch.device("cuda", 1), 0, torch.cuda.current_device()):
            assert torch.zeros(2, device=device).device.type == "cpu"
            assert torch.zeros(2).to(device).device.type == "cpu"
        assert torch.device("cuda", 1) == torch.device("cuda", torch.cuda.current_device())
        tensor = torch.zeros(2)
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.half().type() == "torch.cuda.HalfTensor"
        assert tensor.type(torch.int32).dtype == torch.int32
        assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        with cuda_means_cpu():
            assert torch.ones(1, device="cuda").item() == 1
        assert torch.ones(1, device="cuda").item() == 1
    assert snapshot() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


# -- training --------------------------------------------------------------------------------


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference between two losses of the same step."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("mode", "per_parameter"),
    [
        ("plain", 18.0),
        ("plain-bf16-bucket", 20.0),
        ("remainders", 10.0),
        ("no-remainders", 12.0),
        ("remainders-fp32-bucket", 12.0),
        ("fp8-moments", 8.0),
        ("fp32", 16.0),
    ],
)
def test_bytes_per_parameter(one_process: Any, mode: str, per_parameter: float) -> None:
    chunks, optimizer = tiny.build(mode)
    tiny.train(chunks, optimizer, steps=1)
    measured = measure_bytes(chunks, optimizer)
    assert measured.per_parameter == per_parameter
    assert measured.trainable == measured.owned == sum(p.numel() for p in chunks[0].parameters())
    assert measured.data_parallel_sizes == {"model": 1}
    assert measured.total >= per_parameter * measured.trainable
    assert f"{per_parameter:.2f}" in str(measured)


# -- several processes -----------------------------------------------------------------------


def test_one_and_two_ranks_agree(megatron_core: Any, tmp_path: Path) -> None:
    modes = ["fp32", "plain", "remainders"]
    with rank_server("tests.testing.ranks", tmp_path) as ranks:
        reports = {world: ranks("train", world=world, modes=modes) for world in (1, 2)}
    for mode in modes:
        one, two = (reports[world][0][mode] for world in (1, 2))
        # Another seed changes the losses more than the order of an fp32 sum or a rounded gradient.
        assert apart(two["losses"], one["losses"]) < apart(one["another"], one["losses"]) / 4
        assert two["per_parameter"] == one["per_parameter"]
        assert two["total"] < one["total"]
        assert (one["sharded"], two["sharded"]) == (False, True)
    assert reports[2][0] == reports[2][1] | {
        mode: reports[2][1][mode] | {"total": reports[2][0][mode]["total"]} for mode in modes
    }
