"""Data and a tokenizer for the real ``Trainer``: random tokens, so no file is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.tokenizer import BaseTokenizer

from .cpu import LENGTH, VOCABULARY, packed

if packed():
    from torchtitan.components.data.loader import BaseDataLoader
else:
    from torchtitan.components.dataloader import BaseDataLoader


class WordTokenizer(BaseTokenizer):
    """A tokenizer without words, of which torchtitan reads only the size."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str = "") -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Words(BaseDataLoader):
    """Endless batches that differ between ranks, and that continue after a resume."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, **sizes: Any) -> None:
        self.rank, self.given = dp_rank, 0
        if packed():
            self.size = sizes["num_tokens_per_batch"] // LENGTH
        else:
            self.size = sizes["local_batch_size"]
            assert sizes["seq_len"] == LENGTH

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.given + self.rank)
            self.given += 1
            words = torch.randint(0, VOCABULARY, (self.size, LENGTH + 1), generator=generator)
            positions = torch.arange(LENGTH // 2).repeat(self.size, 2)
            found = {"input": words[:, :-1], "positions": positions, "labels": words[:, 1:]}
            if packed():
                found = {name: one.flatten() for name, one in found.items()}
            labels = found.pop("labels")
            yield found, labels

    def state_dict(self) -> dict[str, Any]:
        return {f"given_{self.rank}": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict.get(f"given_{self.rank}", 0)
