"""torchtitan: compute the LM head in fp32 in trainer and generators, with torchtitan's converter.

Trainer and generators build their model from one ``model_spec``, in which the converter replaces
the config of ``lm_head``.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting.dtypes import parse_dtype
from precision_shim.adapting.rollouts import Head

CONVERTER = "torchtitan.experiments.rl.models.cast_linear.LMHeadCastConverter"


def read_heads(config: Any) -> list[Head]:
    """Describe the LM head that trainer and generators share."""
    from torchtitan.experiments.rl.models.cast_linear import CastLinear
    from torchtitan.models.common.linear import Linear

    subject = "trainer and generators"
    if config.model_spec is None:
        return [Head(subject, CONVERTER, refusal="the config has no model_spec")]
    nodes = config.model_spec.model.traverse(Linear.Config)
    heads = [node for name, node, _, _ in nodes if name.rpartition(".")[2] == "lm_head"]
    casts = [node for node in heads if isinstance(node, CastLinear.Config)]
    wrong = [type(node).__qualname__ for node in heads if type(node) is not Linear.Config]
    if casts and all(parse_dtype(node.compute_dtype) is torch.float32 for node in casts):
        return [Head(subject, CONVERTER, in_fp32=True)]
    if casts:
        refusal = f"LMHeadCastConverter has compute_dtype={casts[0].compute_dtype}"
        return [Head(subject, CONVERTER, refusal=refusal, remedy="Leave compute_dtype out")]
    if not heads or wrong:
        refusal = f"lm_head is a {wrong[0]}" if wrong else "the model has no lm_head"
        return [Head(subject, CONVERTER, refusal=refusal)]
    return [Head(subject, CONVERTER)]


def write(config: Any) -> None:
    """Make torchtitan's converter replace the config of ``lm_head``."""
    from torchtitan.experiments.rl.models.cast_linear import LMHeadCastConverter

    LMHeadCastConverter.Config().build().convert(config.model_spec.model)
