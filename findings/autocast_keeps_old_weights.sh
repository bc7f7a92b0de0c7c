#!/bin/sh
# torch 2.13.0: a model that takes its steps inside an autocast context never sees them.
# autocast keeps the bf16 copy of an fp32 weight until its context ends, also after the optimizer or a
# load has written to the weight. A context around a loop over mini-batches, instead of around each
# forward pass, computes every loss with the first weights. Nothing is said, and the fp32 weights move.
# cache_enabled=False computes each with the present ones.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - << 'END'
import torch


def losses(cache: bool) -> list[float]:
    """The loss of one batch at the beginning of five steps."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.125)
    found = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        for _ in range(5):
            loss = layer(torch.ones(1, 1)).sum()
            found.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert layer.weight.item() == 0.375  # all five steps were taken
    return found


kept, present = losses(True), losses(False)
print("losses of five steps:", kept, "and with cache_enabled=False:", present)
assert kept == [1.0] * 5
assert present == [1.0, 0.875, 0.75, 0.625, 0.5]
END
