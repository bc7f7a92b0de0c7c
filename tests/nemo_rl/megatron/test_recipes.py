"""The shim breaks no config in NeMo-RL's own YAML files, and overrides none of their keys.

NeMo-RL's package lacks its YAML files. The repository's files were read at the tags, ``defaults``
included: 75, 138, 174 and 264 files of 0.4.0, 0.5.0, 0.6.0 and 0.7.0 have a ``megatron_cfg``. The
files' precision keys differ only as in ``SHIPPED``, whose rows omit ``fp8_cfg`` (needs a GPU). The
optimizer keys in files with ``fp8_cfg`` equal the keys of two rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from packaging.version import Version

from precision_shim.errors import PrecisionShimWarning

from ..support import NEMO_RL
from .support import OPTIMIZER
from .test_training import bucket_of, config_of

Make = Callable[..., AbstractContextManager[Any]]

AWARE = {"use_precision_aware_optimizer": True}
SHIPPED: dict[str, tuple[dict[str, Any], bool]] = {
    "most, in teachers and value models too": (AWARE, False),
    "another beta2": ({**AWARE, "adam_beta2": 0.98}, False),
    "not precision-aware": ({}, False),
    "no distributed optimizer": ({"use_distributed_optimizer": False}, False),
    "fp32 bucket": ({"params_dtype": "bfloat16", "adam_beta2": 0.98}, True),
    "bf16 switched off, Megatron too": ({**AWARE, "adam_beta2": 0.98, "bf16": False}, False),
}
"""Per name: optimizer keys that differ from ``OPTIMIZER``, and ``grad_reduce_in_fp32``."""


def outcome(worker: Make, optimizer: dict[str, Any], in_fp32: bool) -> Any:
    """The optimizer's config and the bucket's dtype, or the error of NeMo-RL or Bridge."""
    options = {"optimizer": optimizer, "ddp": {"grad_reduce_in_fp32": in_fp32}}
    try:
        with worker("bfloat16", **options) as made:
            return dict(vars(config_of(made))), bucket_of(made)
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_comes_to_what_it_says(
    worker: Make, shim: Any, fused_adam: str, name: str
) -> None:
    optimizer, in_fp32 = SHIPPED[name]
    before = outcome(worker, optimizer, in_fp32)
    shim()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionShimWarning)
        after = outcome(worker, optimizer, in_fp32)
    told = [str(one.message) for one in caught if one.category is PrecisionShimWarning]
    if isinstance(before, str):  # NeMo-RL refuses this from 0.5 on; its files turn Megatron off
        assert name.startswith("bf16 switched off")
        assert Version("0.5") <= NEMO_RL
        assert after == before
        return
    written = {**OPTIMIZER, **optimizer}
    written["params_dtype"] = getattr(torch, written["params_dtype"])
    found, bucket = after
    assert {key: found[key] for key in written} == written
    assert found == before[0] | {"params_dtype": written["params_dtype"]}
    assert bucket is before[1] is (torch.float32 if in_fp32 else torch.bfloat16)
    assert bool(told) is not in_fp32
    others = [text for text in told if "grad_reduce_in_fp32=False" not in text]
    # If NeMo-RL accepts an fp32 config for a bf16 model (0.4), the audit reports the contradiction.
    assert len(others) == name.startswith("bf16 switched off")
    assert all("params-dtype" in text for text in others)
