#!/bin/sh
# megatron-core 0.16.1: its loss scaler spares one overflow between two growths, not one in a row.
# With hysteresis=2, the default, an overflow alone should leave the scale as it is; the docstring counts
# consecutive ones. But steps without overflow do not give the count back, only a growth does, 1,000
# steps after the last overflow. One overflow in every 900 steps, far from any other, halves the scale
# each time but the first: after ten it is 1/512, where counting consecutive ones it would be 1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1
"$folder/venv/bin/python" -W ignore - << 'END'
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

make_tensor = torch.tensor
torch.tensor = lambda values, device, **more: make_tensor(values, **more)  # there is no GPU
scaler = DynamicGradScaler(
    initial_scale=1.0,
    min_scale=2.0**-20,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    hysteresis=2,
)
scales = []
for _ in range(10):
    for _ in range(899):
        scaler.update(False)
    scaler.update(True)
    scales.append(scaler.scale.item())
print("scale after each lone overflow:", scales)
assert scales == [2.0**-halvings for halvings in range(10)]
END
