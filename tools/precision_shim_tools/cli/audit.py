"""``precision-shim audit DIR``: compare the audits of all ranks of a job."""

from __future__ import annotations

import argparse
import json

from ._output import show, write

HELP = "Compare the audits that a job's ranks wrote into PRECISION_SHIM_AUDIT_DIR."
MORE = (
    "Groups the ranks of each model and optimizer, and names those that differ, those that are "
    "missing, and what problems they have. Compares the weights that were sent to the rollout with "
    "the dtype that the rollout was configured with. Exit status 0: no rank is missing or differs, "
    "and there is no problem and no contradiction; 1: there is one; 2: the directory has no audit."
)

_GIVE = "Give the directory that PRECISION_SHIM_AUDIT_DIR named when the job ran."


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("directory", metavar="DIR", help="the job's PRECISION_SHIM_AUDIT_DIR")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Compare the audits, print the result, and return the exit status."""
    from precision_shim.auditing import files, sent_weights
    from precision_shim.auditing.ranks import Comparison, compare
    from precision_shim.auditing.record import Audit
    from precision_shim.errors import AuditError

    directory = arguments.directory
    if not directory:
        arguments.parser.error(f"DIR is empty: is a variable not set? {_GIVE}")
    try:
        found = list(files.read_audits(directory))
        weights = list(sent_weights.read(directory))
    except OSError as error:
        why = error.strerror or error
        raise AuditError(f"{directory}: cannot be read: {why}. {_GIVE}") from error
    if not found and not weights:
        raise AuditError(
            f"{directory}: no audit here (*{files.SUFFIX}). {_GIVE} If the job has not run yet, "
            "set PRECISION_SHIM_AUDIT_DIR to this directory for the job."
        )
    audits = [(files.number(path, read), read) for path, read in found if isinstance(read, Audit)]
    broken = {path.name: read for path, read in (*found, *weights) if isinstance(read, str)}
    compared = compare(audits)
    sent = sent_weights.by_framework(
        each for _, each in weights if isinstance(each, sent_weights.Sent)
    )
    every: list[Comparison | sent_weights.WeightAudit] = [*compared, *sent]
    ok = not broken and all(each.ok for each in every)
    if arguments.json:
        groups, rollouts = ([each.to_dict() for each in some] for some in (compared, sent))
        result = {"ok": ok, "broken": broken, "groups": groups, "rollouts": rollouts}
        write(json.dumps(result, indent=1))
        return int(not ok)
    blocks = ["\n".join(each.lines()) for each in every]
    if broken:
        lines = (f"  {name}: {reason}" for name, reason in broken.items())
        blocks.append("\n".join(("not read, though named as audits", *lines)))
    blocks.append("no problems" if ok else "problems: see above")
    show("\n\n".join(blocks))
    return int(not ok)
