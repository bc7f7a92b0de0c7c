"""Data and a tokenizer for the real ``Trainer``: words from a generator, none of them read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from .cpu import LENGTH, VOCABULARY


class WordTokenizer(BaseTokenizer):
    """A tokenizer that nobody asks for words."""

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
    """Endless batches; each rank its own, and after a resume those that follow."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **kwargs: Any
    ) -> None:
        self.rank, self.size, self.given = dp_rank, local_batch_size, 0
        assert seq_len == LENGTH

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self.given + self.rank)
            self.given += 1
            words = torch.randint(0, VOCABULARY, (self.size, LENGTH + 1), generator=generator)
            positions = torch.arange(LENGTH // 2).repeat(self.size, 2)
            yield {"input": words[:, :-1], "positions": positions}, words[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {f"given_{self.rank}": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict.get(f"given_{self.rank}", 0)
