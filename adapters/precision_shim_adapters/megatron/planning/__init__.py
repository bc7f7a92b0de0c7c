"""Compute a job's memory on Megatron, and whether the job is legal, from its config alone."""
