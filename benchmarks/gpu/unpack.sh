#!/bin/sh
# unpack.sh FOLDER TARGET: joins the pieces in FOLDER, installs their wheels into TARGET/site and
# the repository into TARGET/repository. Needs a python3 that has torch and pip.
set -eu
folder=$(cd "$1" && pwd)
mkdir -p "$2"
target=$(cd "$2" && pwd)
(cd "$folder" && sha256sum --check --quiet SHA256SUMS)
cat "$folder"/proof.tar.* | tar -xf - -C "$target"
mkdir -p "$target/repository" "$target/site"
tar -xf "$target/repository.tar" -C "$target/repository"
if [ -n "$(ls "$target/wheels")" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$target/site" "$target"/wheels/*.whl
fi
path="$target/site:$target/repository/shim:$target/repository/adapters:$target/repository/tools"
PYTHONPATH="$path" python3 -c "import torch, transformer_engine.pytorch, megatron.core as core, precision_shim
print('torch', torch.__version__, 'megatron-core', core.__version__, 'GPU', torch.cuda.is_available())"
echo "cd $target/repository && PYTHONPATH=$path python3 -m benchmarks.gpu --minutes 25 --out FOLDER"
