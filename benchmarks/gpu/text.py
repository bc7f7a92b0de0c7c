"""Real text that every Python has: the texts of its ``help()`` topics, as bytes."""

from __future__ import annotations

import torch

from .models import Size


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The first nine tenths of the text, for training, and the last tenth, held out."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


class Batches:
    """Random windows of a text; a seed gives the same windows on every device."""

    def __init__(self, text: torch.Tensor, size: Size, device: str, seed: int) -> None:
        self._text = text
        self._size = size
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        """``[batch, length + 1]`` bytes."""
        window = self._size.length + 1
        starts = torch.randint(
            len(self._text) - window, (self._size.batch,), generator=self._generator
        )
        rows = [self._text[start : start + window] for start in starts.tolist()]
        return torch.stack(rows).to(self._device)
