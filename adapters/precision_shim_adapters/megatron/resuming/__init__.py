"""Read and write checkpoints of Megatron's optimizer in an unpatched Megatron's format.

The seams in ``checkpoint``, ``states`` and (for states on the CPU) ``offloaded`` run in the worker.
``foretelling`` predicts how a resume would read a checkpoint. The code that reads checkpoint files
is in ``precision_shim_adapters.megatron_checkpoints``, since ``precision-shim checkpoint`` must run
without torch.
"""
