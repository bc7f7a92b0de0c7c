"""Compare the dtypes in which a job's trainer and its other engines compute; report differences.

An adapter reads its framework's config into an ``Engine`` object for the trainer and for each other
engine. In the driver, before the framework requests GPUs, the adapter calls ``report_engines``.
``engine_name`` converts a user's dtype to the engine's dtype name. The shim does not patch vLLM or
SGLang.
"""
