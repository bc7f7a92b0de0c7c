"""Rules on the arguments of ``FusedAdam`` in each TransformerEngine release, for the stand-in.

The module docstring of ``fused_adam`` lists the releases from whose source the rules were read.
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


def check_arguments(
    version: str,
    master: torch.dtype | None,
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
    *,
    capturable: bool,
    remainders: bool,
) -> None:
    """Raise an error if a version does not accept the given arguments of ``FusedAdam``.

    ``master`` is the dtype of the masters, or ``None`` without masters.

    Raises:
        RuntimeError: the version does not accept the arguments.
        NotImplementedError: the version accepts ``capturable``, but the stand-in does not.
    """
    who = f"FusedAdam (stand-in {version}):"
    if master not in (None, torch.float32, torch.float16):
        raise RuntimeError(f"{who} master weights must be fp32 or fp16, got {master}.")
    legal = [torch.float32, torch.float16, torch.uint8]
    if release(version) >= BF16_MOMENTS_SINCE:
        legal.append(torch.bfloat16)
    for name, dtype in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if dtype not in legal:
            allowed = ", ".join(map(str, legal))
            raise RuntimeError(f"{who} {name} must be one of {allowed}, got {dtype!r}.")
    if not capturable:
        return
    if master not in (None, torch.float32):
        raise RuntimeError(f"{who} capturable takes only fp32 master weights, got {master}.")
    newer = release(version) >= _CAPTURABLE_BF16_SINCE
    capturable_dtypes = (torch.float32, torch.bfloat16) if newer else (torch.float32,)
    if exp_avg != exp_avg_sq or exp_avg not in capturable_dtypes:
        allowed = "both fp32 or both bf16" if newer else "fp32"
        raise RuntimeError(
            f"{who} capturable wants moments that are {allowed}, got {exp_avg} and {exp_avg_sq}."
        )
    # TransformerEngine 2.13 and earlier refuse store_param_remainders; 2.14 and later refuse it
    # only if it has an effect.
    if remainders and (master is not None or not newer):
        raise RuntimeError(f"{who} capturable does not go with store_param_remainders.")
    raise NotImplementedError(
        f"{who} capturable=True is legal in TransformerEngine {version} but needs CUDA graphs; "
        "this stand-in runs without them. Use capturable=False, or the real FusedAdam."
    )
