"""The real SGLang; only the processes that the tests start import it, verl and NeMo-RL."""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
