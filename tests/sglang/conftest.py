"""The real SGLang; verl and SGLang are imported in the server of ``servers.py`` alone."""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
