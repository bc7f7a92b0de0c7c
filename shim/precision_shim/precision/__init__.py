"""Rules on precision: dtype names, sizes, remainders, and whether a resume is exact.

The package has pure functions over torch dtypes and plain values. It contains nothing specific to a
framework, to Megatron or to patching, and imports no third-party package except torch.
"""
