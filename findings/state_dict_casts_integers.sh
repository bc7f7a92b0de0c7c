#!/bin/sh
# torch 2.13.0: Optimizer.load_state_dict casts a state that holds bits as if it held numbers.
# Every tensor of a state but 'step' gets the dtype of its parameter if that is floating point, also an
# int16 tensor with the low halves of fp32 weights. Nothing is said; what was a bit pattern becomes a
# number with other bits. The groups' dicts are replaced, too: who kept one holds a dead copy.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - << 'END'
import torch

low = torch.tensor([1, 257, 32767, -1], dtype=torch.int16)


class WithLowHalves(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"low_half": low.clone()}


saved = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
writer = WithLowHalves([saved])
writer.step()
reader = WithLowHalves([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))])
group = reader.param_groups[0]
reader.load_state_dict(writer.state_dict())
(state,) = reader.state.values()
print("written:", low.tolist(), low.dtype)
print("read:   ", state["low_half"].tolist(), state["low_half"].dtype)
assert state["low_half"].dtype is torch.bfloat16
assert state["low_half"].tolist() == [1.0, 256.0, 32768.0, -1.0]
assert group is not reader.param_groups[0]
END
