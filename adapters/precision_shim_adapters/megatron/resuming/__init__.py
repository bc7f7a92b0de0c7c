"""Read and write checkpoints of Megatron's optimizer in the form of an unpatched Megatron.

``checkpoint`` and ``states`` act in the worker, ``offloaded`` for states on the CPU, and
``foretelling`` predicts how a resume would read a checkpoint. The code that reads the files is in
``precision_shim_adapters.megatron_checkpoints``, since the doctor must run without torch.
"""
