"""The proof on a GPU: one command measures every claim on the real TransformerEngine.

    python -m benchmarks.gpu --minutes 20 --out FOLDER    # a machine with one GPU
    python -m benchmarks.gpu --dry-run                    # the same on a CPU, with tiny models

Run the command in the root of the repository. The command needs torch, megatron-core,
TransformerEngine and this package (PYTHONPATH=shim:adapters:tools is enough); see requirements.txt
and bundle.py in this folder. The command writes each result to FOLDER/proof.json at once.
``python -m benchmarks.gpu.report FOLDER/proof.json`` makes docs/proof.md from the results.
"""
