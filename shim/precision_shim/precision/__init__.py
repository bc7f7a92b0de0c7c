"""Rules on precision: dtype names, sizes, remainders, and whether a resume is exact.

This package has pure functions over torch dtypes and plain values. The package contains nothing
specific to a framework, to Megatron or to patching, and imports no third party's code except torch.
"""
