#!/bin/sh
# torch 2.13.0: an fp8 tensor cannot be pickled, though torch.save writes and torch.load reads it.
# pickle.dumps works, pickle.loads raises AttributeError (UntypedStorage has no dtype). What sends
# tensors by pickle (multiprocessing queues of plain objects, object collectives, ray.get) fails where
# it receives; a bf16 tensor goes the same way unharmed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - << 'END'
import io
import pickle

import torch

for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
    tensor = torch.tensor([0.5, 1.0, 2.0]).to(dtype)
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file).float().tolist() == [0.5, 1.0, 2.0]
    try:
        got = pickle.loads(pickle.dumps(tensor)).float().tolist()
    except AttributeError as error:
        got = error
    print(dtype, got)
    assert isinstance(got, AttributeError) == (dtype is not torch.bfloat16)
END
