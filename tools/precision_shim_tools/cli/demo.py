"""``precision-shim demo``: run ``examples/demo``, which is in a clone but not in the wheel."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

HELP = "Train a tiny GPT through verl and Megatron-core, without and with the shim."
MORE = (
    "It runs only from a clone of the repository, where this help lists its options: on this "
    "machine's CPU, in fresh processes, with verl's own functions; measured from the tensors. Exit "
    "status 0: the effect is what was promised; 1: it is not; 2: the demo cannot run here."
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the clone's demo, and run that demo."""
    # `precision-shim --help` must not run code from the current directory. The clone's code is
    # imported only for `precision-shim demo`, whose parser has no other command.
    root = _clone() if parser.get_default("alone") else None
    if root is None:
        parser.set_defaults(any_options=True)
        return
    sys.path.insert(0, str(root))
    from examples import demo

    demo.add_options(parser)
    parser.set_defaults(command=demo.demo)


def _clone() -> Path | None:
    """Return the root of the clone that contains this package or the current directory, if any."""
    places = [*Path(__file__).parents]
    with contextlib.suppress(FileNotFoundError):  # the current directory was deleted
        places += [Path.cwd(), *Path.cwd().parents]
    for root in places:
        if (root / "examples/demo/worker.py").is_file() and (root / "shim/precision_shim").is_dir():
            return root
    return None


def run(asked: argparse.Namespace) -> int:
    """Say that there is no clone here."""
    print(
        "precision-shim demo: it runs from a clone of the repository, where `tox run -e demo` "
        "starts it.",
        file=sys.stderr,
    )
    return 2
