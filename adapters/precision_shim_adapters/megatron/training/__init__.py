"""The seams in Megatron that set the dtypes the shim chose, scale the loss and skip steps."""
