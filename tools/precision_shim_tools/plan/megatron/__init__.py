"""Compute a Megatron job's memory, and check that the job is legal, from its config alone."""
