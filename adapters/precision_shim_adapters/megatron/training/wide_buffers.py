"""Keep fp32 buffers, such as a router's counters of tokens, in a model that Megatron makes 16-bit.

Megatron's ``Float16Module`` rounds all buffers, and makes only a few of them fp32 again. Delete
this module when ``Float16Module`` leaves buffers in the dtype that their module declares.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from itertools import takewhile
from textwrap import dedent
from typing import Any

import torch

from precision_shim.adapting import Call, seam

from ..policy.requested import DISPATCH, MOSTLY, SCALING
from .build import DIRECT, current_build

_WIDE = (torch.float32, torch.float64)
_DECLARES = re.compile(r"float32|float64|torch\.(float|double)\b|\.(float|double)\(")


@seam(
    "megatron.core.transformer.module:Float16Module.__init__",
    (DISPATCH, SCALING),
    why="every path to a 16-bit model passes here: Megatron's, mbridge's and Megatron-Bridge's",
    delete_when="Float16Module leaves buffers in their declared dtype",
    relies_on=("half", "bfloat16"),
    **MOSTLY,
)
def keep_wide_buffers(call: Call, module: Any) -> Any:
    """Put back the fp32 buffers that were rounded with the parameters."""
    wide = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if buffer.dtype in _WIDE and not follows_model(owner.__class__, name)
    ]
    result = call.proceed()
    kept = set()
    for owner, name, buffer in wide:
        if getattr(owner, name).dtype is not buffer.dtype:
            setattr(owner, name, buffer)
            kept.add(name)
    if kept:
        chosen = f"buffers that stay fp32: {', '.join(sorted(kept))}"
        because = "their modules declare it, and Float16Module rounds them"
        (current_build() or DIRECT).decide(DISPATCH, chosen, because)
    return result


@cache
def follows_model(kind: type, name: str) -> bool:
    """Whether a module's class declares no dtype for a buffer, and only computes with it.

    Gemma 4's layers multiply their hidden states by such a buffer; in fp32 it would make them fp32.
    A buffer that the class updates is a counter; without the class's source a buffer counts as one.
    """
    text = _source(kind)
    made = re.search(rf"register_buffer\({name!r}, (.*)\)", text)
    if made is None:
        return False
    names = "|".join(set(re.findall(r"\b[a-z_]\w*", made[1])))
    values = re.findall(rf"^ +(?:{names}) = (.*)", text, re.M)
    if any(map(_DECLARES.search, (made[1], *values))):
        return False
    here = rf"self\.{name}\b"
    updated = rf"{here}(\[.*\])? \S+= |{here}\[.*\] = |{here}\.\w+_\(|{here} = .*{here}"
    return re.search(updated, text) is None and re.search(here, text) is not None


@cache
def _source(kind: type) -> str:
    bases = takewhile(lambda base: base is not torch.nn.Module, kind.__mro__)
    try:
        sources = [dedent(inspect.getsource(one)) for one in bases]
    except (OSError, TypeError):
        return ""
    return "\n".join(ast.unparse(ast.parse(source)) for source in sources)
