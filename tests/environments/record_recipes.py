"""Record the precision keys of recipes: ``record_recipes.py NAME CHECKOUT FOLDER...``.

bash runs each shell script of the folders. On its ``PATH`` are only programs that write their
arguments down, and a few harmless ones. Redirect the output to a file in ``tests/plan/recipes/``.
NAME says which release the checkout is.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

KEY = re.compile(
    r"dtype|precision|[bf][fp](16|32|8)|quant|optimizer_(impl|offload)|override_ddp|ddp_config|"
    r"strategy$|(^|_)engine$|^optim$|@|searchpath|mbridge$|adv_estimator|use_kl_|lora\.?_?rank|"
    r"optimizer$|^model\.path$"
)
ENTRY = re.compile(r"(verl|skyrl|examples|integrations)\.[\w.]*(main|sft_trainer)(?!_gen)\w*")
PROGRAMS = ("python", "python3", "uv", "torchrun", "ray")
HARMLESS = ("bash", "cat", "dirname", "basename", "date", "env")
STUB = '#!/bin/bash\nprintf "%s\\0" "$@" >> "$CAPTURE"; printf "\\n\\0" >> "$CAPTURE"\n'
SHELL = (
    "command_not_found_handle() { return 0; }; ulimit() { :; }; "
    'export -f command_not_found_handle ulimit; exec bash "$0"'
)


def launched(script: Path, root: Path, folder: Path) -> list[list[str]]:
    """The command lines that a script starts."""
    capture = folder / "capture"
    capture.write_text("")
    environ = {"PATH": str(folder / "bin"), "HOME": "/home/me", "CAPTURE": str(capture)}
    with tempfile.TemporaryFile() as said:
        subprocess.run(
            ["/bin/bash", "-c", SHELL, str(script)],
            cwd=root,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            timeout=60,
            check=False,
        )
    written = capture.read_text().replace(str(root), ".")
    return [line.split("\0")[:-1] for line in written.split("\n\0")]


def record(root: Path, *folders: str) -> Iterator[str]:
    """Yield one line for each set of keys."""
    found: dict[tuple[str, ...], list[tuple[str, bytes]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as made:
        (bin_ := Path(made, "bin")).mkdir()
        for program in PROGRAMS:
            (bin_ / program).write_text(STUB)
            (bin_ / program).chmod(0o755)
        for program in HARMLESS:
            (bin_ / program).symlink_to(shutil.which(program) or program)
        for script in sorted(one for folder in folders for one in (root / folder).rglob("*.sh")):
            for words in launched(script, root, Path(made)):
                entry = next((word for word in words if ENTRY.fullmatch(word)), None)
                if entry is None:
                    continue
                pairs = [word for word in words if "=" in word and not word.startswith("-")]
                keys = sorted({word for word in pairs if KEY.search(word.partition("=")[0])})
                line = re.sub("(-name|-path) ", r"\1=", " ".join(words))
                # A path within the checkout; any other one is that of the entry point.
                keys[:0] = re.findall("--config-(?:name=|path=./[^ ]+/)[^ ]+", line)
                if not entry.startswith(("verl", "skyrl")):  # not installed: what it builds upon
                    base = "main_sft" if "sft" in entry else "entrypoints.main_base"
                    entry = f"skyrl.train.{base}"
                one = (script.relative_to(root).as_posix(), script.read_bytes())
                found[(entry, *keys)].append(one)
    for words, recipes in sorted(found.items()):
        digest = hashlib.sha256(b"".join(text for _, text in recipes)).hexdigest()[:12]
        yield " ".join((str(len(recipes)), digest, recipes[0][0], *words))


if __name__ == "__main__":
    name, checkout, *folders = sys.argv[1:]
    print(f"# {name}: number of recipes, digest of their text, the first of them, its launch line")
    print(*record(Path(checkout).resolve(), *folders), sep="\n")
