"""Replaces GPUs by the CPU in each process of a test's Ray cluster that imports NeMo-RL."""

from tests.nemo_rl.cpu import stay_on_cpu

stay_on_cpu()
