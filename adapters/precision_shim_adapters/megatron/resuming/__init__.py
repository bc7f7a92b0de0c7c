"""Checkpoints of Megatron's optimizer: written as an unpatched Megatron reads them, and read.

``checkpoint`` and ``states`` act in the worker, ``offloaded`` for states on the CPU, and
``foretelling`` tells what a resume makes of a checkpoint. The doctor reads files where there is no
torch, so that stands outside: ``precision_shim_adapters.megatron_checkpoints``.
"""
