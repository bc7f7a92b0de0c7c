#!/bin/sh
# torchtitan 0.3.0 with torchao 0.18.0: Float8LinearConverter with emulate=True drops its recipe.
# recipe_name="rowwise" gives torchao's config for rows; with emulate=True, which is for tests without
# the hardware, the converter makes a default config instead, whose scales are per tensor. So a test of
# the numbers by emulation is one of another recipe, without a word.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 triton==3.7.1 torchtitan==0.3.0 torchao==0.18.0
"$folder/venv/bin/python" -W ignore - << 'END'
from unittest import mock

from torchtitan.components.quantization import float8


def granularity(**given: object) -> str:
    # The converter asks for the hardware that only a GPU has, unless it emulates.
    with mock.patch.object(float8, "has_cuda_capability", lambda *_: True):
        made = float8.Float8LinearConverter(float8.Float8LinearConverter.Config(**given))
    config = next(one for one in vars(made).values() if hasattr(one, "cast_config_weight"))
    return str(config.cast_config_weight.scaling_granularity)


rows, emulated = granularity(recipe_name="rowwise"), granularity(recipe_name="rowwise", emulate=True)
print("scales of the weights with rowwise, and with rowwise and emulate:", rows, emulated)
assert ("AXISWISE" in rows.upper(), "TENSORWISE" in emulated.upper()) == (True, True)
END
