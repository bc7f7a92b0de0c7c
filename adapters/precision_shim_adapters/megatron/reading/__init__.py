"""What is in force in Megatron's live objects: its optimizers, the audit's seams, the probes."""
