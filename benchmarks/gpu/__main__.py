"""``python -m benchmarks.gpu``: see the package's docstring."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path

from . import plan
from .runner import Runner
from .store import Store, exit_status
from .table import table


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Measures every claim of this project on one GPU.",
        epilog=(
            "Exit status: 0 every part ran and every check holds; 1 a part failed or a check does "
            "not hold; 2 wrong arguments, or no GPU; 3 nothing failed, but the time was too short "
            "for a part."
        ),
    )
    made.add_argument("--minutes", type=float, default=25.0, help="when to be over (%(default)s)")
    made.add_argument("--out", type=Path, default=Path("build/gpu-proof"), help="(%(default)s)")
    made.add_argument("--dry-run", action="store_true", help="all of it on a CPU, on tiny models")
    made.add_argument("--parts", help="some of them, by name or number: memory,3")
    return made


def main(argv: list[str] | None = None) -> int:
    arguments = parser()
    options = arguments.parse_args(argv)
    try:
        parts = plan.named(options.parts)
    except ValueError as error:
        arguments.error(str(error))
    if not options.dry_run:
        missing = what_is_missing()
        if missing:
            print(f"python -m benchmarks.gpu: {missing}", file=sys.stderr)
            return plan.NO_GPU
    store = Store(options.out, parts, dry_run=options.dry_run, minutes=options.minutes)
    # SIGTERM ends the run as Ctrl-C does, and the results so far are printed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        Runner(store, parts, dry=options.dry_run, minutes=options.minutes).run()
    print(table(store.values))
    print(f"\n{store.path}")
    return exit_status(store.values)


def what_is_missing() -> str:
    """Return a message if a GPU or TransformerEngine is missing here, otherwise ``""``."""
    import torch

    from precision_shim_tools.testing import real_transformer_engine

    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no GPU here. Run it on a machine with one, or with "
            "--dry-run."
        )
    if real_transformer_engine() is None:
        return (
            "TransformerEngine cannot be imported here. Install what benchmarks/gpu/"
            "requirements.txt lists, or use --dry-run."
        )
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
