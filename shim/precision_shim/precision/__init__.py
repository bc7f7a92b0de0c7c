"""Precision itself: dtype names, sizes, remainders, and what a resume continues.

Pure functions over torch dtypes and plain values. They know no framework, no Megatron and no
patching, and import nothing but torch and the standard library.
"""
