#!/bin/sh
# transformers 5.9.0: model.to(torch.bfloat16) is not the model that dtype=torch.bfloat16 loads.
# The weights are equal, bit for bit, but .to() also rounds the frequencies of the rotary embedding, a
# buffer that is in no checkpoint and that from_pretrained leaves in fp32. The angle's error grows with
# the position. A trainer that casts and a rollout that loads are two models.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.9.0
FOLDER=$folder "$folder/venv/bin/python" -W ignore - << 'END'
import os

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
)
path = os.environ["FOLDER"] + "/model"
Qwen2ForCausalLM(config).save_pretrained(path)
loaded = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
cast = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).to(torch.bfloat16)
pairs = zip(loaded.state_dict().values(), cast.state_dict().values(), strict=True)
assert all(torch.equal(*pair) for pair in pairs)
dtypes = [one.model.rotary_emb.inv_freq.dtype for one in (loaded, cast)]


def difference(position: int) -> float:
    """How far the cosines of the two models' angles are apart, at most."""
    cosines = [
        one.model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[position]]))[0]
        for one in (loaded, cast)
    ]
    return (cosines[0] - cosines[1]).abs().max().item()


found = {position: round(difference(position), 3) for position in (1, 100, 1000, 10000)}
print("frequencies:", *dtypes, "largest difference of a cosine, by position:", found)
assert dtypes == [torch.float32, torch.bfloat16]
assert found[1] < 0.01 < found[100] < 0.1 < found[1000] < 1.0 < found[10000]
END
