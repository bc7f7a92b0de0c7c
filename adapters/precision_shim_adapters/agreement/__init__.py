"""Compare the dtypes in which a job's trainer and its other engines compute; report differences.

In the driver, before the framework requests GPUs, an adapter reads the config into ``Engine``
objects and calls ``report_sides``. The shim does not patch vLLM or SGLang.
"""
