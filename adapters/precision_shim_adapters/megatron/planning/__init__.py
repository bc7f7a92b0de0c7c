"""What a job on Megatron will cost and whether it is legal, from its config alone."""
