"""Read and write checkpoints of Megatron's optimizer in an unpatched Megatron's format."""
