#!/bin/sh
# hydra-core 1.3.2: 'offload: off' in a file is false, and offload=off on the command line is true.
# Files are YAML 1.1, for which on, off, yes and no are booleans; the command line's grammar knows only
# true and false, and makes a text of the others, which no type refuses in a config without a schema,
# and which is true where code asks 'if config.offload'.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet hydra-core==1.3.2 omegaconf==2.3.0
echo 'offload: true' > "$folder/job.yaml"
echo 'offload: off' > "$folder/off.yaml"
FOLDER=$folder "$folder/venv/bin/python" -W ignore - << 'END'
import os

from hydra import compose, initialize_config_dir

with initialize_config_dir(os.environ["FOLDER"], version_base=None):
    file, line = compose("off").offload, compose("job", ["offload=off"]).offload
print("off in a file:", repr(file), "and on the command line:", repr(line), "which is", bool(line))
assert (file, line) == (False, "off")
END
