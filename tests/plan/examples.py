"""Plan every example of a framework's checkout: python -m tests.plan.examples FRAMEWORK CHECKOUT

Shell scripts run in a sandbox, in which only commands that print or compute text have an effect. A
word that would start Python is recorded. Each recorded line that starts a training is then planned
by the command ``plan``, with one model size for all. The script prints the counts, and the lines
that were refused. Its exit status is 1 if a plan ended in a traceback, or if nothing was planned.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from precision_shim.cli import main

HARMLESS = (
    *("basename", "dirname", "date", "seq", "cat", "sed", "awk", "grep", "cut", "tr", "head"),
    *("tail", "printf", "echo", "expr", "sort", "wc", "bash", "sh", "true", "false", "env"),
)
NOTED = ("python", "python3", "torchrun", "uv", "ray", "accelerate")
SIZE = "30B,experts=28B"
TRAINS = (
    "main_ppo",
    "async_main",
    "entrypoint",
    "sft_trainer",
    "skyrl.train",
    "run_",
    "main_",
    "train.py",
)
_STUB = """#!/bin/bash
[ "$1" = -c ] && exit 1  # no device, no package
{ printf '%s\\0' "$NAME" "$@"; printf '\\n\\0'; } >> "$NOTES"
"""


def scripts(checkout: Path) -> Iterator[Path]:
    for folder in ("examples", "recipe"):
        yield from sorted((checkout / folder).rglob("*.sh"))


def lines_of(script: Path, checkout: Path) -> list[list[str]]:
    """The lines by which a script starts Python, with its variables expanded."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in HARMLESS:
            for real in (f"/bin/{name}", f"/usr/bin/{name}"):
                if Path(real).exists() and not (place / name).exists():
                    (place / name).symlink_to(real)
        for name in NOTED:
            stub = place / name
            stub.write_text(_STUB.replace("$NAME", name))
            stub.chmod(0o755)
        notes, quoted = place / "notes", shlex.quote(str(script))
        handler = "command_not_found_handle() { return 0; }; export -f command_not_found_handle\n"
        handler += "ulimit() { return 0; }\n"
        environ = {
            **{"PATH": folder, "HOME": folder, "NOTES": str(notes), "USER": "nobody"},
            # The number of nodes is unset, because the scripts are written for their own default.
            **{"RANK": "0", "MASTER_ADDR": "localhost"},
            # Some scripts require these variables and have no default for them.
            **{"HDFS_ROOT": folder, "INFER_BACKEND": "vllm", "LORA_ADAPTER_PATH": folder},
        }
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                ["/bin/bash", "-c", f"{handler} set +e; source {quoted} 8 out"],
                cwd=checkout,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=20,
                check=False,
            )
        if not notes.exists():
            return []
        words = notes.read_text(errors="replace").split("\0")
    found: list[list[str]] = [[]]
    for word in words:
        if word == "\n":
            found.append([])
        else:
            found[-1].append(word)
    return [one for one in found if len(one) > 1]


def commands(framework: str, checkout: Path) -> Iterator[tuple[str, list[str]]]:
    """What each example starts."""
    if framework == "nemo-rl":
        for path in sorted((checkout / "examples" / "configs").rglob("*.yaml")):
            yield str(path.relative_to(checkout)), ["examples/run_grpo.py", "--config", str(path)]
        return
    for script in scripts(checkout):
        name = str(script.relative_to(checkout))
        for line in lines_of(script, checkout):
            if any(part in word for word in line if "=" not in word for part in TRAINS):
                yield name, line


def planned(words: list[str]) -> tuple[int, str]:
    """Exit status, and what is illegal or why the line was refused; -1 for a traceback."""
    said, printed = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            main(["plan", "--parameters", SIZE, "--json", "--", *words])
    except SystemExit as end:
        status = int(end.code or 0)
        if status == 1:
            problems = json.loads(printed.getvalue())["problems"]
            return status, "; ".join(f"{one['key']}: {one['message']}" for one in problems)
        return -1 if "Report this line" in said.getvalue() else status, said.getvalue()
    except BaseException:
        return -1, traceback.format_exc()
    return -1, "no exit status"


def run(framework: str, checkout: Path) -> int:
    os.chdir(checkout)
    counts: collections.Counter[str] = collections.Counter()
    for name, words in commands(framework, checkout):
        status, text = planned(words)
        kind = {0: "legal", 1: "illegal", 2: "refused"}.get(status, "traceback")
        counts[kind] += 1
        if status:
            print(f"{kind}: {name}: {' '.join(text.split())[:400]}", flush=True)
    print(f"{framework}: {sum(counts.values())} commands: {dict(counts)}")
    return int(bool(counts["traceback"]) or not counts["legal"])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], Path(sys.argv[2]).resolve()))
