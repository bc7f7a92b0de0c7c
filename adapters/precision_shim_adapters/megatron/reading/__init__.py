"""Read Megatron's live optimizers, with the seams for the audit and the probes of Megatron."""
