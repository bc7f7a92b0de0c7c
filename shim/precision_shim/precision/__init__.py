"""Rules on precision: dtype names, sizes, splitting fp32 into bf16 and int16, exact resumes.

This package has pure functions over torch dtypes and plain values. The package contains nothing
specific to a framework, to Megatron or to patching, and imports no third party's code except torch.
"""
