"""What Ray and ``inspect`` see of an actor class's methods."""

from __future__ import annotations

import inspect
from typing import Any


def described(actor_class: Any) -> dict[str, Any]:
    """Each method's name, docstring and signature, and the signature by which Ray checks calls."""
    meta = actor_class.__ray_metadata__
    plain = meta.modified_class.__ray_actor_class__
    found = {}
    for name, parameters in meta.method_meta.signatures.items():
        if "_precision_shim" in name:  # skip methods that wrapping a base class adds
            continue
        method = getattr(plain, name, None)
        found[name] = {
            "Ray": tuple(parameters),
            "inspect": None if method is None else inspect.signature(method),
            "doc": getattr(method, "__doc__", None),
            "names": (getattr(method, "__name__", ""), getattr(method, "__qualname__", "")),
            "module": getattr(method, "__module__", ""),
            "annotations": getattr(method, "__annotations__", {}),
        }
    return found
