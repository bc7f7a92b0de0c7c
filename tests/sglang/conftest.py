"""The real SGLang; only the server of ``servers.py`` imports verl and SGLang."""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
