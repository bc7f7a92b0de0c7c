"""Audit Megatron's live optimizers, and test assumptions about Megatron with probes."""
