"""A trainer on torch's FSDP2, as small as one can be; it knows nothing of precision_shim."""
