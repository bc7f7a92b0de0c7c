"""Compute the memory of a job on Megatron, and whether it is legal, from its config alone."""
