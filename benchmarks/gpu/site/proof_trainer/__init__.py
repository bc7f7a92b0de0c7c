"""A trainer on Megatron-core alone, for measurements; it never imports precision_shim."""
