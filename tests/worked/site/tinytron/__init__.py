"""A trainer on Megatron-core, as small as one can be; it knows nothing of precision_shim."""
