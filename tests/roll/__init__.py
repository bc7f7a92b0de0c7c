"""ROLL 0.3.0 from its repository: its real Megatron and FSDP2 strategies on a CPU."""
