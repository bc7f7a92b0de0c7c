"""What a part is given: the place that it runs in, and where its results go."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .place import Place

Tell = Callable[..., None]


class Bench:
    """One part's view of the run.

    Attributes:
        dry: a dry run: a CPU, the stand-in for TransformerEngine, tiny models.
        folder: an empty folder, removed at the end.
    """

    def __init__(
        self, part: str, *, dry: bool, ends_at: float, folder: Path, tell: Tell, stack: ExitStack
    ) -> None:
        self.part = part
        self.dry = dry
        self.folder = folder
        self._ends_at = ends_at
        self._tell = tell
        self._stack = stack

    @property
    def place(self) -> Place:
        """The device with Megatron's parallel state on it; entered when it is first asked for."""
        from .place import enter

        return enter(self.dry, self._stack, self._tell)

    def seconds_left(self) -> float:
        """Until the run has to be over."""
        return self._ends_at - time.time()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Something whose error is kept as a check that does not hold; what follows is begun."""
        try:
            yield
        except Exception as error:  # whatever it is
            traceback.print_exc()
            text = str(error).strip()[:1000] or "(no message)"
            self.check(f"{what}: runs to its end", False, f"{type(error).__name__}: {text}")

    def record(self, what: str, shows: str, **figures: Any) -> None:
        """Keep a result: what was measured, what it shows in few words, and all its figures."""
        figures = plain(figures)
        self._tell(kind="result", part=self.part, what=what, shows=shows, figures=figures)

    def check(self, says: str, holds: bool | None, why: str = "", **figures: Any) -> None:
        """Keep whether a sentence holds; ``None`` with the reason where nothing can be said."""
        if holds is None and not why:
            raise ValueError(f"{self.part}: {says!r} is not judged, and nothing says why")
        self._tell(
            kind="check",
            part=self.part,
            says=says,
            holds=None if holds is None else bool(holds),
            why=why,
            figures=plain(figures),
        )

    def check_on_gpu(self, says: str, holds: bool, why: str, **figures: Any) -> None:
        """As ``check``, for a sentence that a dry run cannot judge; ``why`` it cannot."""
        if self.dry:
            self.check(says, None, why, **figures)
        else:
            self.check(says, holds, **figures)


def plain(value: Any) -> Any:
    """Figures as JSON has them: a number that is none, such as a skipped step's norm, by name."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
