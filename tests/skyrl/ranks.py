"""One of the two ranks of ``test_two_ranks``, with the arguments FOLDER and CHECKPOINT."""

from __future__ import annotations

import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import precision_shim  # noqa: E402
from precision_shim.errors import ScalerCheckpointError  # noqa: E402
from tests.skyrl import support  # noqa: E402
from tests.skyrl.cpu import skyrl_on_cpu  # noqa: E402
from tests.skyrl.vllm_names import put_in_place  # noqa: E402
from tests.stand_ins.tiny_models import make_checkpoint  # noqa: E402

RANK, FOLDER, CHECKPOINT = int(os.environ["RANK"]), Path(sys.argv[1]), Path(sys.argv[2])
OVERFLOW = 1e9


def make(role: str, dtype: str | None = "fp16") -> Any:
    # If embeddings are untied, SkyRL makes a critic's model on the first rank only, with a function
    # that transformers 5 has removed.
    path = FOLDER / "tied" if role == "critic" else CHECKPOINT
    return support.fsdp_worker(role, path, dtype, rank=RANK, world_size=2)


def train(worker: Any, seed: int, advantage: float = 1.0) -> tuple[dict[str, float], float]:
    data = support.batch(100 * seed + RANK, advantage=advantage)
    return support.metrics_of(worker.forward_backward(data)), worker.optim_step()


def parameters(worker: Any) -> torch.Tensor:
    module = getattr(worker.model, "model", worker.model)
    return torch.cat([one.detach().to_local().flatten().clone() for one in module.parameters()])


def everywhere(value: object) -> list[object]:
    found: list[object] = [None, None]
    dist.all_gather_object(found, value)
    return found


def settle(worker: Any) -> None:
    for seed in range(20):
        if math.isfinite(train(worker, seed)[1]):
            return
    raise AssertionError("the scale never fitted")


def one_role(role: str) -> None:
    worker = make(role)
    settle(worker)

    # If one rank overflows, both ranks skip the step and lower their scale.
    before = parameters(worker)
    scale = train(worker, 30, OVERFLOW if RANK == 1 else 1.0)[0]["loss_scale"]
    assert torch.equal(before, parameters(worker))
    after = train(worker, 31)[0]["loss_scale"]
    assert after == scale / 2
    assert len(set(everywhere(after))) == 1

    path = str(FOLDER / role)
    worker.save_checkpoint(path)
    plan = [1.0, OVERFLOW, 1.0, 1.0, 1.0]
    straight = [train(worker, 50 + i, advantage) for i, advantage in enumerate(plan)]
    assert any(not math.isfinite(norm) for _, norm in straight)
    assert math.isfinite(straight[-1][1])
    again = make(role)
    again.load_checkpoint(path)
    resumed = [train(again, 50 + i, advantage) for i, advantage in enumerate(plan)]
    assert str(resumed) == str(straight), (resumed, straight)
    assert torch.equal(parameters(worker), parameters(again))

    # If the scaler's state is missing, the resumed training differs.
    file = Path(path) / f"extra_state_world_size_2_rank_{RANK}.pt"
    content = torch.load(file, weights_only=False)
    record = content["client_state"].pop("precision_shim_scaler")
    torch.save(content, file)
    dist.barrier()
    fresh = make(role)
    fresh.load_checkpoint(path)
    others = [train(fresh, 50 + i, advantage) for i, advantage in enumerate(plan)]
    assert str(others) != str(straight)

    # If one rank's file is from another checkpoint, both ranks raise.
    if RANK == 0:
        content["client_state"]["precision_shim_scaler"] = record
        torch.save(content, file)
    dist.barrier()
    assert "different loss scaler states" in refused(make(role), path)

    # If one rank's file is damaged, both ranks raise an error that names the file.
    if RANK == 1:
        broken = {**record, "state": {**record["state"], "scale": 1.0}}
        content["client_state"]["precision_shim_scaler"] = broken
        torch.save(content, file)
    dist.barrier()
    assert "rank_1.pt" in refused(make(role), path)


def refused(worker: Any, path: str) -> str:
    try:
        worker.load_checkpoint(path)
    except ScalerCheckpointError as error:
        return str(error)
    raise AssertionError("the state was accepted")


def one_stream(worker: Any) -> None:
    """Each rank sends every weight unsharded, rounded once to the inference engines' dtype."""
    for dtype in (torch.float16, torch.bfloat16):
        sent = support.weights_sent(worker, dtype)
        assert support.equal_streams(sent, support.weights_rounded_once(worker, dtype))
        sums = {name: float(one.double().sum()) for name, one in sent.items()}
        assert len({str(one) for one in everywhere(sums)}) == 1


os.environ.update(WORLD_SIZE="2", LOCAL_RANK="0")
dist.init_process_group("gloo", init_method=f"file://{FOLDER / 'meet'}", rank=RANK, world_size=2)
import skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker  # noqa: E402, F401

if RANK == 0:
    make_checkpoint(FOLDER / "tied", "float32", tied=True)
dist.barrier()
with skyrl_on_cpu():
    # The shim loads a checkpoint of unpatched SkyRL.
    plain = make("policy")
    train(plain, 0)
    plain.save_checkpoint(str(FOLDER / "plain"))
    precision_shim.install(settings={"growth_interval": 3, "log": "quiet"})
    loaded = make("policy")
    loaded.load_checkpoint(str(FOLDER / "plain"))
    assert torch.equal(parameters(plain), parameters(loaded))
    settle(loaded)
    with pytest.MonkeyPatch.context() as patch:
        put_in_place(patch)
        one_stream(loaded)
    for one in ("policy", "critic"):
        one_role(one)
    precision_shim.uninstall()
    # Unpatched SkyRL loads a checkpoint of the shim.
    plain.load_checkpoint(str(FOLDER / "policy"))
    train(plain, 1)
dist.barrier()
dist.destroy_process_group()
print("everything held")
