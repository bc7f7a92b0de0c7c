#!/bin/sh
# torch 2.13.0 and megatron-core 0.16.1: a loss scale whose growth interval is lowered may never grow.
# Both scalers ask whether the steps since the last change equal the interval, not whether they reach
# it. After 150 steps and a resume with an interval of 100 (torch: set_growth_interval, because a load
# brings back the saved one; megatron-core: another loss_scale_window) they never do, until an overflow.
# After 50 steps all is well.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1
"$folder/venv/bin/python" -W ignore - << 'END'
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

make_tensor = torch.tensor
torch.tensor = lambda values, device=None, **more: make_tensor(values, **more)  # there is no GPU
torch.cuda.current_device = lambda: "cpu"
torch.Tensor.cuda = lambda tensor, *where: tensor


def of_torch(before: int) -> float:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def take(scaler: torch.amp.GradScaler, steps: int) -> torch.amp.GradScaler:
        for _ in range(steps):
            scaler.scale(weight.sum() * 0.0).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler

    saved = take(torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=200), before)
    resumed = torch.amp.GradScaler("cpu")
    resumed.load_state_dict(saved.state_dict())
    resumed.set_growth_interval(100)
    return take(resumed, 1000).get_scale()


def of_core(before: int) -> float:
    saved, resumed = (DynamicGradScaler(1.0, 1.0, 2.0, 0.5, steps, 2) for steps in (200, 100))
    for _ in range(before):
        saved.update(False)
    resumed.load_state_dict(saved.state_dict())
    for _ in range(1000):
        resumed.update(False)
    return resumed.scale.item()


for of in (of_torch, of_core):
    found = {before: of(before) for before in (50, 150)}
    print(of.__name__, "scale after 1,000 more steps, by the steps before the resume:", found)
    assert found == {50: 1024.0, 150: 1.0}
END
