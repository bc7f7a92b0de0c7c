"""The seams in Megatron that apply the decisions, scale the loss and skip steps."""
