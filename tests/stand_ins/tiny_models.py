"""Writes a tiny Hugging Face checkpoint, which the frameworks can load."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 64


def make_checkpoint(
    folder: Path,
    dtype: str = "float32",
    *,
    tied: bool = False,
    value_head: bool = False,
    width: int = 16,
) -> Path:
    """Write a Qwen2 of a few thousand parameters with a word-level tokenizer.

    Args:
        folder: where to.
        dtype: torch's name of the parameters' dtype.
        tied: whether the output layer shares the embedding.
        value_head: whether one number per token replaces the output layer.
        width: the layers' width; vLLM's attention needs heads of 32, and so a width of 64.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForTokenClassification,
    )

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        classifier_dropout=0.0,  # a value head's default dropout of 0.1 is random
    )
    kind = Qwen2ForCausalLM
    if value_head:
        config.num_labels = 1
        kind = Qwen2ForTokenClassification
    kind(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
