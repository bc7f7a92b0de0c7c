"""For the processes of a test's Ray cluster: where NeMo-RL is imported, the CPU stands for GPUs."""

from precision_shim.testing.nemo_rl_cpu import stay_on_cpu

stay_on_cpu()
