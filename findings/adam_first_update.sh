#!/bin/sh
# torch 2.13.0: reading an optimizer's state before its first step makes that step smaller.
# get_optimizer_state_dict makes the missing states by a step with lr=0, and that step stays counted.
# Adam then corrects the bias of its moments for two steps: the first update is 0.744 of what it is
# without the reading. A job that writes a checkpoint before it trains is such a job.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/python" -W ignore - << 'END'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(read: bool) -> float:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if read:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return 1.0 - model.weight[0, 0].item()


without, with_reading = first_update(False), first_update(True)
print("first update, alone and after a reading of the state:", without, with_reading)
assert abs(with_reading / without - 0.744) < 0.001
END
