"""Model, tokenizer, prompts and reward of the RL demo, whose task is to repeat a letter.

verl loads this file by its path, and calls :func:`compute_score`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

LETTERS = "abcd"
ANSWER = 6
"""The number of tokens of an answer."""
PROMPTS, ANSWERS = 8, 8
"""The number of prompts per step, and of answers to each prompt."""
WIDTH = 64
_END = "<|im_end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}" + _END + "\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Return the share of the answer's positions that have the prompt's letter."""
    return solution_str[:ANSWER].count(ground_truth) / ANSWER


def make(folder: Path, steps: int, seed: int = 0) -> None:
    """Write the folder ``model`` (random fp32 weights, a tokenizer) and ``prompts.parquet``."""
    import random

    import pandas
    from transformers.utils import logging

    logging.disable_progress_bar()
    _tokenizer().save_pretrained(folder / "model")
    _model(seed).save_pretrained(folder / "model")
    draw = random.Random(seed)
    letters = [draw.choice(LETTERS) for _ in range(PROMPTS * steps)]
    rows = [
        {
            "data_source": "repeat",
            "prompt": [{"role": "user", "content": letter}],
            "ability": "repeat",
            "reward_model": {"style": "rule", "ground_truth": letter},
            "extra_info": {"index": index},
        }
        for index, letter in enumerate(letters)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")


def _vocabulary() -> dict[str, int]:
    # The second token is a byte-level tokenizer's character for the newline.
    tokens = ["<pad>", "\u010a", ">", _END, *LETTERS]
    tokens += [f"<{number}>" for number in range(24 - len(tokens))]
    return {token: number for number, token in enumerate(tokens)}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=_END)
    made.chat_template = _TEMPLATE
    return made


def _model(seed: int) -> Any:
    """A Qwen2 with two layers, initialised so that each layer keeps the scale of its input."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    words = _vocabulary()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=WIDTH**-0.5,
        tie_word_embeddings=False,
        eos_token_id=words[_END],
        pad_token_id=words["<pad>"],
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)
