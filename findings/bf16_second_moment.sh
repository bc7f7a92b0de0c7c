#!/bin/sh
# torch 2.13.0: Adam's second moment of a bf16 parameter does not decay at the default beta2.
# An exponential average multiplies by 0.999, which changes a bf16 number by less than half of its
# spacing (2^-9 relative), so that it rounds back. After 6,000 steps with gradients of 1 and 6,000 with
# 0.1, exp_avg_sq is where it was, and not near 0.01; with beta2=0.99 it decays.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - << 'END'
import torch


def second_moment(beta2: float) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([parameter], lr=0.0, betas=(0.9, beta2), foreach=False)
    found = []
    for gradient in (1.0, 0.1):
        for _ in range(6000):
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        found.append(optimizer.state[parameter]["exp_avg_sq"].item())
    return found


stays, decays = second_moment(0.999), second_moment(0.99)
print("exp_avg_sq after gradients of 1, then of 0.1:", {0.999: stays, 0.99: decays})
assert stays == [0.5, 0.5]
assert decays[1] < 0.02 < 0.9 < decays[0]
END
