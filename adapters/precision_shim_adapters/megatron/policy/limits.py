"""``precision-shim doctor``'s remark on state dtypes that TransformerEngine does not support.

``precision-shim doctor`` runs without torch and Megatron, and so does this module.
"""

from __future__ import annotations

from collections.abc import Iterable

from precision_shim.precision.releases import BF16_MOMENTS_SINCE, release
from precision_shim.reporting.record import SeamStatus

_DISPATCH = "bf16-dispatch"


def describe_limits(
    who: str, seams: Iterable[SeamStatus], version: str | None, error: str | None
) -> str:
    """The remark about a framework; empty if TransformerEngine sets no limit.

    ``who`` is framework and version; ``seams``: their status in a job; ``version`` and ``error``
    (of an import) are TransformerEngine's.
    """
    if not any(
        (seam.feature, seam.state) == (_DISPATCH, "pending") and seam.target.startswith("megatron.")
        for seam in seams
    ):
        return ""
    since = ".".join(map(str, BF16_MOMENTS_SINCE))
    if version is None or error:
        is_not = "cannot be imported" if version else "is not installed"
        what = (
            f"TransformerEngine {is_not}: optimizer states stay fp32, and "
            "use_precision_aware_optimizer=true ends in UnsupportedPrecisionError"
        )
    elif (known := release(version)) and known < BF16_MOMENTS_SINCE:
        what = (
            f"TransformerEngine {version} takes no bf16 moments: optimizer states stay fp32, and "
            "exp_avg_dtype=bf16 or exp_avg_sq_dtype=bf16 ends in DtypeError"
        )
    else:
        return ""
    return (
        f"{who}: on Megatron: {what}. Install TransformerEngine {since} or newer where the "
        "model trains, or leave its states fp32."
    )
