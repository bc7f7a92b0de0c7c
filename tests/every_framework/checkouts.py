"""Runs the doctor on a framework's checkout on ``PYTHONPATH``: sources without metadata."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from precision_shim.process import registry as _registry

_DOCTOR = """
import json, sys
from precision_shim.process import registry, settings
from precision_shim_tools.predicted import predict_status

entry = registry.entries()[sys.argv[1]]
found, problems = predict_status(entry, settings.resolve(environ={}))
seams = {f"{one.target} {one.feature}": [one.state, one.reason] for one in found.seams}
print(json.dumps([found.version, found.tested, found.reason, seams, problems]))
"""


class Told:
    def __init__(self, framework: str, path: list[str], *flags: str) -> None:
        done = subprocess.run(
            [sys.executable, *flags, "-c", _DOCTOR, framework],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        self.version: str
        self.tested: bool
        self.reason: str
        self.seams: Mapping[str, Any]
        self.problems: list[str]
        self.version, self.tested, self.reason, self.seams, self.problems = json.loads(
            done.stdout.splitlines()[-1]
        )


def as_installed(framework: str) -> Told:
    """The doctor's report on the installed framework."""
    return Told(framework, [one for one in sys.path if one])


def as_checkout(
    framework: str, folder: Path, change: Callable[[Path], None] = lambda root: None
) -> Told:
    """The doctor's report on a copy of the framework, beside the other installed packages.

    Args:
        framework: its name.
        folder: an empty one.
        change: function that changes the copy, given the copy's root.
    """
    entry = _registry.entries()[framework]
    root, site = folder / "checkout", folder / "site"
    root.mkdir()
    site.mkdir()
    own = {*entry.packages, entry.distribution.replace("-", "_")}
    path = [one for one in sys.path if one and "site-packages" not in one]
    for one in dict.fromkeys(os.path.realpath(one) for one in sys.path):
        if "site-packages" in one:
            for file in sorted(Path(one).iterdir()):
                if file.name.partition("-")[0].lower() not in own:
                    with contextlib.suppress(FileExistsError):  # Ray bundles its own psutil
                        (site / file.name).symlink_to(file)
                elif file.name in entry.packages:
                    shutil.copytree(file, root / file.name)
    change(root)
    # With -S Python adds no site-packages of its own to this path.
    return Told(framework, [*path, str(root), str(site)], "-S")
