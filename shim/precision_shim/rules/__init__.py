"""The rules: which dtype, which bucket, which bytes, which scale.

Pure functions over torch dtypes and plain values. They know no framework and no patching, and
import nothing but torch and the standard library.
"""
