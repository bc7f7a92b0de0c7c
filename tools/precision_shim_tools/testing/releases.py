"""Rules on the arguments of ``FusedAdam`` in each TransformerEngine release, for the stand-in.

Each function has a TransformerEngine version as argument and needs no optimizer. The module
docstring of ``fused_adam`` lists the releases from whose source the rules were read.
"""

from __future__ import annotations

import torch

from precision_shim.precision.releases import BF16_MOMENTS_SINCE, release

DEFAULT_VERSION = "2.11.0"
"""The TransformerEngine release that the class ``FusedAdam`` reproduces."""

OLDEST = (1, 13)
"""The oldest release that ``fused_adam_for`` supports."""

PARAM_REMAINDERS_SINCE = (2, 1)
EMPTY_GROUPS_COUNT_SINCE = (2, 19)
_CAPTURABLE_BF16_SINCE = (2, 14)


def check_state_dtypes(
    version: str,
    master: torch.dtype | None,
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
) -> None:
    """Raise a ``RuntimeError`` if a version does not accept the given dtypes of the states.

    ``master`` is ``None`` without masters.
    """
    if master not in (None, torch.float32, torch.float16):
        raise RuntimeError(
            f"FusedAdam (stand-in {version}): master weights must be fp32 or fp16, got {master}."
        )
    legal = [torch.float32, torch.float16, torch.uint8]
    if release(version) >= BF16_MOMENTS_SINCE:
        legal.append(torch.bfloat16)
    for name, dtype in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if dtype not in legal:
            raise RuntimeError(
                f"FusedAdam (stand-in {version}): {name} must be one of "
                f"{', '.join(map(str, legal))}, got {dtype!r}."
            )


def refuse_capturable(
    version: str,
    master: torch.dtype | None,
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
    *,
    asked_remainders: bool,
    remainders: bool,
) -> None:
    """Raise the version's error for ``capturable=True``, or else ``NotImplementedError``.

    Args:
        version: a TransformerEngine version.
        master: dtype of the masters; ``None`` without masters.
        exp_avg: dtype of the first moment.
        exp_avg_sq: dtype of the second moment.
        asked_remainders: whether ``store_param_remainders`` was passed.
        remainders: whether ``store_param_remainders`` has an effect.
    """
    where = f"FusedAdam (stand-in {version}): capturable"
    if master not in (None, torch.float32):
        raise RuntimeError(f"{where} takes only fp32 master weights, got {master}.")
    both_bf16 = exp_avg == exp_avg_sq == torch.bfloat16
    both_fp32 = exp_avg == exp_avg_sq == torch.float32
    newer = release(version) >= _CAPTURABLE_BF16_SINCE
    if not both_fp32 and not (newer and both_bf16):
        allowed = "both fp32 or both bf16" if newer else "fp32"
        raise RuntimeError(
            f"{where} wants moments that are {allowed}, got {exp_avg} and {exp_avg_sq}."
        )
    # TransformerEngine 2.13 and earlier refuse store_param_remainders; 2.14 and later refuse it
    # only if it has an effect.
    if remainders if newer else asked_remainders:
        raise RuntimeError(f"{where} does not go with store_param_remainders.")
    raise NotImplementedError(
        f"{where}=True is legal in TransformerEngine {version} but needs CUDA graphs; "
        "this stand-in runs without them. Use capturable=False, or the real FusedAdam."
    )
