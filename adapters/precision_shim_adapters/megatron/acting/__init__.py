"""The seams in Megatron that build an optimizer as decided, scale its loss and skip its steps."""
