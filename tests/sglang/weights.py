"""A model whose weights SGLang returns, and what the audit must find in them."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from precision_shim_adapters.rollout.held_sglang import NAMES, ROWS
from precision_shim_adapters.rollout.in_engine import count_exact

from ..tiny_models import VOCABULARY, make_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # transformers imports torchao, whose docstrings cause some
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def make_llama(folder: Path) -> Path:
    """Write an fp32 model of an architecture whose weights SGLang returns."""
    make_checkpoint(folder, width=64)  # for the tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def share_of(model: Path, *dtypes: torch.dtype) -> tuple[float, int]:
    """The share of sampled weights that are exact in bf16 after rounding to ``dtypes`` in turn."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    counts = []
    for name in NAMES:
        value = weights[name][:ROWS]
        for dtype in dtypes:
            value = value.to(dtype)
        counts.append(count_exact(value))
    exact, sampled = torch.stack(counts).sum(0).tolist()
    return exact / sampled, sampled
