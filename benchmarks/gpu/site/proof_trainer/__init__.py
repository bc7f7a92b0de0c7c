"""A trainer on Megatron-core alone, to measure on; it knows nothing of precision_shim."""
