"""The proof on a GPU: one command that measures every claim on real TransformerEngine.

    python -m benchmarks.gpu --minutes 20 --out FOLDER    # a machine with one GPU
    python -m benchmarks.gpu --dry-run                    # all of it on a CPU, on tiny models

Run it in the root of the repository. It needs torch, megatron-core, TransformerEngine and this
package (PYTHONPATH=shim:adapters is enough); see requirements.txt and bundle.py beside this file.
Each result is in FOLDER/proof.json as soon as it exists. docs/proof.md is made of that file by
``python -m benchmarks.gpu.report``.
"""
