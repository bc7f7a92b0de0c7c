"""A process that runs parts: ``python -m benchmarks.gpu.worker SPEC FD``, started by the runner.

The process writes its results to the file descriptor FD as lines of JSON; output of the libraries
goes to the runner's log. On a GPU every part has its own process, because an error can leave a
process without a usable device, and because one part's memory would count for the next part.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .bench import Bench
from .plan import Part


def main(argv: list[str]) -> None:
    spec = json.loads(argv[0])
    with os.fdopen(int(argv[1]), "w", buffering=1, encoding="utf-8") as pipe, ExitStack() as stack:

        def tell(**message: Any) -> None:
            print(json.dumps(message, allow_nan=False), file=pipe, flush=True)

        for values in spec["parts"]:
            one_part(Part(**values), spec["dry"], spec["ends_at"], tell, stack)


def one_part(
    part: Part, dry: bool, ends_at: float, tell: Callable[..., None], stack: ExitStack
) -> None:
    def state(state: str, reason: str = "", **more: Any) -> None:
        tell(kind="state", part=part.name, state=state, reason=reason, **more)

    reason = part.too_late(ends_at - time.time(), dry)
    if reason:
        state("not run", reason)
        return
    state("running")
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="proof-") as folder:
            bench = Bench(
                part.name, dry=dry, ends_at=ends_at, folder=Path(folder), tell=tell, stack=stack
            )
            importlib.import_module(part.module).run(bench)
    except Exception as error:  # any error: the next part still runs
        traceback.print_exc()
        text = str(error).strip()
        outcome = "failed", f"{type(error).__name__}: {text[:2000] or '(no message)'}"
    else:
        outcome = "ran", ""
    state(*outcome, seconds=round(time.perf_counter() - began, 2))


if __name__ == "__main__":
    main(sys.argv[1:])
