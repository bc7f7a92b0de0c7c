#!/bin/sh
# PyYAML 6.0.3 reads the learning rate 1e-6 as a string, OmegaConf 2.3.0 as a number.
# YAML 1.1 wants a point before the exponent: 1.0e-6 is a number for both. A job whose config goes
# through one loader trains, and through the other passes '1e-6' to the optimizer.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet PyYAML==6.0.3 omegaconf==2.3.0
"$folder/venv/bin/python" -W ignore - << 'END'
import omegaconf
import yaml

for text in ("1e-6", "1.0e-6"):
    line = f"lr: {text}"
    both = yaml.safe_load(line)["lr"], omegaconf.OmegaConf.create(line).lr
    print(text, both)
    assert [type(one) for one in both] == [str if text == "1e-6" else float, float]
END
