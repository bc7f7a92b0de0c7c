#!/bin/sh
# torch 2.13.0: AdamW with lr=1e-6 and weight_decay=0.01 decays no fp32 weight at all.
# The decay multiplies a weight by 1 - lr * weight_decay. From 3e-8 down that factor is 1 in fp32, in
# all three implementations, whatever the number of steps. These two values are common in RL after
# training, and fp32 master weights do not help: 10,000 steps leave each bit where it was.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - << 'END'
import torch


def left(lr: float, **how: bool) -> float:
    """The share of the weights' norm that is left after 10,000 steps without a gradient."""
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.01, **how)
    weight.grad = torch.zeros_like(weight)
    for _ in range(10_000):
        optimizer.step()
    return weight[0].item()


for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
    found = {lr: left(lr, **how) for lr in (1e-6, 1e-5)}
    print(how, "weight of 1 after 10,000 steps, by learning rate:", found)
    assert found[1e-6] == 1.0
    assert found[1e-5] < 0.9991
END
