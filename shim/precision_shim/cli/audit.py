"""``precision-shim audit DIR``: the audits of all ranks of a job, compared."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from . import add_command
from ._output import show

if TYPE_CHECKING:
    from . import Commands

_HELP = "Compare the audits that a job's ranks wrote into PRECISION_SHIM_AUDIT_DIR."
_MORE = (
    "Groups the ranks of each model and optimizer, and names those that differ, those that are "
    "missing, and what problems they have. Holds the weights that were sent to the rollout against "
    "what its engines hold. Exit status 0: all there, alike and without a problem or a "
    "contradiction; 1: not so; 2: the directory has no audit."
)


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "audit", run, help=_HELP, more=_MORE)
    parser.add_argument("directory", metavar="DIR", help="what PRECISION_SHIM_AUDIT_DIR was")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print, and return the exit status."""
    from ..auditing import files, halves
    from ..auditing.pairing import pair
    from ..auditing.ranks import compare
    from ..auditing.record import Audit

    directory = arguments.directory
    try:
        found = list(files.read_audits(directory))
        sides = list(halves.read(directory))
    except OSError as error:
        print(f"{directory}: cannot be read: {error.strerror or error}", file=sys.stderr)
        return 2
    if not found and not sides:
        print(
            f"{directory}: no audit here (*{files.SUFFIX}); set PRECISION_SHIM_AUDIT_DIR to this "
            "directory for the job.",
            file=sys.stderr,
        )
        return 2
    audits = [(files.number(path, one), one) for path, one in found if isinstance(one, Audit)]
    broken = {path.name: one for path, one in (*found, *sides) if isinstance(one, str)}
    compared = compare(audits)
    pairs = pair(one for _, one in sides if not isinstance(one, str))
    ok = not broken and all(one.ok for one in compared) and all(one.ok for one in pairs)
    if arguments.json:
        print(
            json.dumps(
                {
                    "ok": ok,
                    "broken": broken,
                    "groups": [
                        {
                            "model": one.whose,
                            "parts": one.part,
                            "ok": one.ok,
                            "world_size": one.world_size,
                            "alike": list(one.alike),
                            "differ": {
                                rank: {
                                    key: {"found": there, "elsewhere": here}
                                    for key, (here, there) in what.items()
                                }
                                for rank, what in one.differ.items()
                            },
                            "missing": list(one.missing),
                            "problems": {k: list(v) for k, v in one.problems.items()},
                            "before_step": list(one.before_step),
                        }
                        for one in compared
                    ],
                    "rollouts": [one.to_dict() for one in pairs],
                },
                indent=1,
            )
        )
        return int(not ok)
    blocks = ["\n".join(one.lines()) for one in compared]
    blocks += ["\n".join(one.lines()) for one in pairs]
    if broken:
        lines = (f"  {name}: {reason}" for name, reason in broken.items())
        blocks.append("\n".join(("no audits, though named so", *lines)))
    blocks.append("no problems" if ok else "problems: see above")
    show("\n\n".join(blocks))
    return int(not ok)
