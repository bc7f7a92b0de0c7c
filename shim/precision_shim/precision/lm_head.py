"""Decide whether all engines of an RL job can compute their LM head in fp32.

The head's matrix product rounds every logit to the model's dtype. With a head in fp32 in only one
engine, the probabilities differ (https://github.com/NVIDIA-NeMo/RL/pull/3936).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEAD_MARK = "precision_shim_computes"
"""Attribute that the shim adds to a changed LM head: canonical name of the head's compute dtype."""


@dataclass(frozen=True)
class Head:
    """The LM head of one engine of a job, as the job's config describes it.

    Attributes:
        subject: ``"actor"``, ``"policy"``, ``"ref"`` or ``"rollout"``.
        key: the config key that makes the engine compute its LM head in fp32.
        in_fp32: whether the config already makes the engine compute its LM head in fp32.
        refusal: why the engine cannot compute its LM head in fp32; empty if it can.
        remedy: what the user can do about the refusal.
        value: the key's value for fp32.
        known: whether the engine that the job will use is installed on this machine.
    """

    subject: str
    key: str = ""
    in_fp32: bool = False
    refusal: str = ""
    remedy: str = ""
    value: str | bool = "float32"
    known: bool = True


def refused(heads: Sequence[Head], *, may_write: bool) -> list[Head]:
    """Return the LM heads that cannot be in fp32; if there is one, the shim changes no head.

    ``may_write`` is whether the shim can still set the engines' config keys.
    """
    return [head for head in heads if head.refusal or not (head.in_fp32 or may_write)]
