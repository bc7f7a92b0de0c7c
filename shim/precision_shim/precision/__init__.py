"""Rules on precision: dtype names, sizes, remainders, and whether a resume is exact.

Pure functions over torch dtypes and plain values. They contain nothing specific to a framework, to
Megatron or to patching, and import nothing but torch and the standard library.
"""
