"""Sequence packing: one loss per packed sequence, and dummy micro-batches on some ranks.

Packing needs flash attention on a GPU. In these tests causal attention over a whole pack replaces
flash attention, so sequences of a pack attend to one another. All other code is NeMo-RL's own.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from .support import KINDS, batch, loss_for, parameters
from .test_training import Times, figures, same

pytestmark = pytest.mark.parametrize("kind", [one for one in KINDS if one != "value"])

PACKING = {
    "enabled": True,
    "train_mb_tokens": 24,
    "logprob_mb_tokens": 24,
    "algorithm": "modified_first_fit_decreasing",
    "sequence_length_round": 4,
}


@pytest.fixture(autouse=True)
def _attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **given: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", attend)
    for name in ("_flash_attn_2_can_dispatch", "_flash_attn_can_dispatch"):
        monkeypatch.setattr(PreTrainedModel, name, lambda *a, **k: True, raising=False)
    monkeypatch.setattr(modeling_utils, "is_flash_attn_2_available", lambda: True, raising=False)
    monkeypatch.setattr(
        modeling_utils,
        "lazy_import_flash_attention",
        lambda *args, **kwargs: None,
        raising=False,
    )


def packed(seed: int = 0) -> Any:
    arguments = {
        "algorithm": PACKING["algorithm"],
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": 1,
        "max_tokens_per_microbatch": 24,
    }
    shards, _ = batch(seed=seed).shard_by_batch_size(
        1, batch_size=4, sequence_packing_args=arguments
    )
    return shards[0]


def test_packed_sequences_are_scaled_and_skipped(kind, worker, shim) -> None:
    with worker(kind, "float16", sequence_packing=PACKING) as one:
        expected = float(one.train(packed(), loss_for(kind))["grad_norm"])
    shim()
    with worker(kind, "float16", sequence_packing=PACKING) as one:
        # The factor 2**-16 cancels the loss scale, so both backward passes are equal bit for bit.
        result = one.train(packed(), Times(loss_for(kind), 2.0**-16))
        assert float(result["grad_norm"]) == expected * 2.0**-16 > 0.0
        assert figures(result) == ([65536.0], [0.0])
        before = parameters(one)
        assert figures(one.train(packed(1), Times(loss_for(kind), 1e30))) == ([65536.0], [1.0])
        assert same(before, parameters(one))


def test_a_dummy_micro_batch_adds_nothing(kind, worker, shim, monkeypatch) -> None:
    all_reduce = torch.distributed.all_reduce

    def more(tensor: Any, *args: Any, **given: Any) -> Any:
        # Simulates that another rank has one micro-batch more.
        work = all_reduce(tensor, *args, **given)
        if given.get("op") == torch.distributed.ReduceOp.MAX:
            tensor.add_(1)
        return work

    shim()
    found = []
    for dummies in (0, 1):
        with worker(kind, "float16", sequence_packing=PACKING) as one:
            if dummies:
                monkeypatch.setattr(torch.distributed, "all_reduce", more)
            losses = _Counting(loss_for(kind))
            result = one.train(packed(), losses)
            found.append((parameters(one), float(result["grad_norm"]), losses.calls))
    assert found[1][2] > found[0][2]
    assert found[0][1] == found[1][1]
    assert all(
        itertools.starmap(torch.equal, zip(*(one[0].values() for one in found), strict=True))
    )


class _Counting(Times):
    def __init__(self, loss_fn: Any) -> None:
        super().__init__(loss_fn, 1.0)
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)
