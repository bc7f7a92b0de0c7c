"""Read and write checkpoints of Megatron's optimizer in an unpatched Megatron's format.

``optimizer_state`` has the seams at whole checkpoints, ``parameter_state`` at one parameter's
states, ``cpu_offload`` at states on the CPU.
"""
