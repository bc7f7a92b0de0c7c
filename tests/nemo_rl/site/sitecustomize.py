"""For the processes of a test's Ray cluster: where NeMo-RL is imported, the CPU stands for GPUs."""

from tests.nemo_rl.cpu import stay_on_cpu

stay_on_cpu()
