"""Audit Megatron's live optimizers."""
