"""The interface of a part of the proof: its device, its folder, and functions that report."""

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
    """The interface between the run and one part.

    Attributes:
        dry: whether the run is on a CPU, with the stand-in for TransformerEngine and tiny models.
        folder: an empty folder, which is removed when the part ends.
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
        """The device with Megatron's parallel state; the first access sets it up."""
        from .place import enter

        return enter(self.dry, self._stack, self._tell)

    def seconds_left(self) -> float:
        """The time until the run must end."""
        return self._ends_at - time.time()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Report an error in the ``with`` block as a failed check; the part continues."""
        try:
            yield
        except Exception as error:  # any error
            traceback.print_exc()
            text = str(error).strip()[:1000] or "(no message)"
            self.check(f"{what}: runs to its end", False, f"{type(error).__name__}: {text}")

    def record(self, what: str, shows: str, **figures: Any) -> None:
        """Report a result: what was measured, a summary in a few words, and all figures."""
        figures = plain(figures)
        self._tell(kind="result", part=self.part, what=what, shows=shows, figures=figures)

    def check(self, says: str, holds: bool | None, why: str = "", **figures: Any) -> None:
        """Report whether a statement holds; ``None``, with a reason, if it cannot be judged."""
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
        """Call ``check``; in a dry run, report only ``why`` a CPU cannot judge the statement."""
        if self.dry:
            self.check(says, None, why, **figures)
        else:
            self.check(says, holds, **figures)


def plain(value: Any) -> Any:
    """Convert figures for JSON: NaN and infinities, such as a skipped step's norm, to strings."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
