"""Compute a float16 model's varlen attention in float16, as torchtitan's generator does.

torchtitan casts queries, keys and values to bfloat16 for the kernel, although the kernel accepts
float16, and casts the result back. The shim replaces the attention by a plain function, because
torchtitan compiles blocks with ``fullgraph=True`` and dynamo cannot trace a wrapt wrapper.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch

from precision_shim.adapting import decide, in_force, seam
from precision_shim.errors import SeamError

from ...torch_fp16 import FEATURE
from .trainers import FRAMEWORK, UPSTREAM

_GROUP = "attention"
_CAST, _KEPT = "bfloat16", "float16"
_IN_FLOAT16 = (
    "varlen attention in float16",
    "the model computes in float16; torchtitan alone casts to bfloat16",
)
_IN_BFLOAT16 = (
    "varlen attention in bfloat16",
    "torchtitan casts to it, and the shim's attention is refused in this version",
)
_EXPERTS = (
    "grouped experts in bfloat16",
    "torchtitan casts their inputs and weights to it, in training and in its generator",
)


@seam(
    "torchtitan.models.common.attention:VarlenAttention.forward",
    FEATURE,
    group=_GROUP,
    why="the cast to bfloat16, which the trainer's generator does not make",
    upstream=UPSTREAM,
    delete_when="torchtitan's varlen attention leaves float16 as it is",
    relies_on=(_CAST, "varlen_attn", "to"),
    replaces=True,
)
def keep_float16(forward: Any) -> Any:
    """Make an attention function that does not cast float16 to bfloat16.

    With a float16 input, the new function calls a copy of torchtitan's function in which
    ``float16`` replaces the name ``bfloat16``; without, it calls torchtitan's function.

    Raises:
        SeamError: torchtitan's function does not cast to bfloat16, or also mentions float16.
    """
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if not isinstance(forward, FunctionType) or _CAST not in names or _KEPT in names:
        raise SeamError(f"{forward!r} is no function that casts to torch.{_CAST} and nothing else")
    exchanged = tuple(_KEPT if name == _CAST else name for name in names)
    rest = (forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    in_float16 = FunctionType(forward.__code__.replace(co_names=exchanged), *rest)
    in_float16.__kwdefaults__ = forward.__kwdefaults__

    # Keep ``wraps``, since torchtitan's Module.parallelize reads the function's parameter names.
    @functools.wraps(forward)
    def attend(self: Any, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Tensor) and given.dtype is torch.float16:
                return in_float16(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return attend


def tell(subject: str, model_parts: Any) -> None:
    """Report in which dtype a float16 model's attention and experts compute."""
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.moe import GroupedExperts

    modules = [module for part in model_parts for module in part.modules()]
    said = []
    if any(isinstance(module, VarlenAttention) for module in modules):
        said.append(_IN_FLOAT16 if in_force(FRAMEWORK, FEATURE, _GROUP) else _IN_BFLOAT16)
    if any(isinstance(module, GroupedExperts) for module in modules):
        said.append(_EXPERTS)
    for chosen, because in said:
        decide(FRAMEWORK, subject, FEATURE, chosen, because)
