"""``precision-shim doctor``: show installed packages, seams to patch, and reasons for refusals.

The doctor reads metadata, source and the records of our adapters, and imports no framework; without
a current record it imports the adapter, and torch with it. Child processes check the start-up file
and the import of TransformerEngine, which fails without CUDA libraries and may crash.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pkgutil
import platform
import site
import subprocess
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from precision_shim import __version__
from precision_shim.errors import SettingsError
from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import standby
from precision_shim.process import versions as _versions
from precision_shim.process.framework import Adapter
from precision_shim.process.in_force import offered
from precision_shim.process.settings import PREFIX, TABLE, Settings
from precision_shim.reporting import text as _status_text
from precision_shim.reporting.record import FrameworkStatus
from precision_shim.reporting.text import fold
from precision_shim.seams import find_spec

from ..predicted import as_dict, predict_status
from ._output import Progress, show, write

HELP = "Show what is installed, what would be patched here and why not."
MORE = "The exit status is 1 when a feature that the variables ask for could not be applied."

PACKAGES = (
    ("wrapt", ("wrapt",)),
    ("torch", ("torch",)),
    ("transformer-engine", ("transformer_engine",)),
    ("megatron-core", ("megatron",)),
    ("megatron-bridge", ("megatron.bridge",)),
    ("ray", ("ray",)),
)
_SHOWN = {"pending": "to wrap"}  # status() shows "pending" as "waits for import"
_COLUMN = 16
_OTHER_PYTHON = (
    f"This is {sys.executable}; ask the Python that runs the job: JOB'S-PYTHON -m precision_shim "
    "doctor"
)
_NO_SETTINGS = "would not be patched, because a setting is not valid"
_LONG = 8  # Maximum number of lines for one problem; --verbose shows all lines.
_PATIENCE = 120  # Timeout in seconds for a child process; TransformerEngine's import is slow

_START_UP = """
import json
from precision_shim.process import standby
print(json.dumps(standby.waiting()))
"""
_TRANSFORMER_ENGINE = """
import json
try:
    import transformer_engine.pytorch
    print(json.dumps(""))
except BaseException as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print every feature by training engine, every seam and every setting, too",
    )
    parser.add_argument(
        "--against",
        metavar="PATH",
        help="judge a wheel, a checkout, a source folder or a site-packages instead of what is "
        "installed; nothing of it is imported (exit status 2: it holds no framework and no vLLM or "
        "SGLang)",
    )
    parser.add_argument("--framework", metavar="NAME", help="with --against: the only one to judge")


def run(asked: argparse.Namespace) -> int:
    """Print the doctor's report, and return the exit status: 1 if there is a problem."""
    if asked.against is not None:
        from . import _against

        return _against.run(asked)
    if asked.framework is not None:
        asked.parser.error("--framework needs --against PATH")
    found, frameworks = examine()
    if asked.json:
        write(json.dumps(found, indent=2))
    else:
        show(_text(found, frameworks, verbose=asked.verbose))
    return 0 if found["ok"] else 1


def examine() -> tuple[dict[str, Any], dict[str, FrameworkStatus]]:
    """Return the doctor's results, in a form for JSON, and each framework's status."""
    standby.stop()  # the doctor's imports must not install the shim in this process
    entries = _registry.entries()
    problems: list[str] = []
    settings, switch = None, "invalid"
    try:
        settings = _settings.resolve(known_frameworks=entries)
    except SettingsError as error:
        problems.append(str(error))
    with contextlib.suppress(SettingsError):  # which is among the problems already
        switch = _settings.switch()
    near = get_close_matches(PREFIX, {*os.environ} - {PREFIX}, cutoff=0.9)
    problems += [f"{name} is no variable of precision_shim: write {PREFIX}" for name in near]
    Progress.stage = "starting a Python"
    start_up = _start_up(switch, problems)
    packages = {name: _package(name, packages) for name, packages in PACKAGES}
    frameworks: dict[str, FrameworkStatus] = {}
    for name, entry in offered(entries, settings).items():
        Progress.stage = f"reading {name}"
        frameworks[name], refused = _predict(entry, settings)
        problems += refused
    problems = list(dict.fromkeys(problems))
    limits = _limits(packages["transformer-engine"], frameworks)
    if settings is not None and settings["optimizer_states"] == "follow-model":
        problems += limits
        limits = []
    if switch in ("on", "strict") and {s.state for s in frameworks.values()} <= {"absent", "off"}:
        problems.append(
            "nothing to patch here: none of these frameworks is installed or asked for: "
            f"{', '.join(frameworks)}. {_OTHER_PYTHON}"
        )
    found: dict[str, Any] = {
        # With PRECISION_SHIM=0 no feature is requested, so no feature can be missing.
        "ok": not problems or switch == "off",
        "precision_shim": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "switch": switch,
        "start_up": start_up,
        "packages": packages,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIX)},
        "features": list(settings.features) if settings else [],
        "settings": {
            name: {"value": settings[name], "from": settings.origin[name]}
            for name in TABLE
            if settings
        },
        "strict": settings is not None and settings.strict,
        "frameworks": {name: as_dict(status) for name, status in frameworks.items()},
        "problems": problems,
        "limits": limits,
    }
    found["verdict"] = _verdict(found, frameworks)
    return found, frameworks


def _verdict(found: Mapping[str, Any], frameworks: Mapping[str, FrameworkStatus]) -> str:
    """Return whether the shim is on in this environment, and what to do if it is not."""
    here = {name: status for name, status in frameworks.items() if status.version}
    if not found["settings"]:
        return "OFF in this environment: correct the setting that is not valid"
    if found["switch"] in ("unset", "off"):
        elsewhere = "" if here else f". No framework is installed here. {_OTHER_PYTHON}"
        return f"OFF in this environment: export {PREFIX}=1{elsewhere}"
    asked = (f"{name} {status.version}" for name, status in here.items() if status.state != "off")
    return f"ON: {', '.join(asked)}" if found["ok"] else "ON, with the problems above"


def _start_up(switch: str, problems: list[str]) -> dict[str, Any]:
    name = "zz_precision_shim.pth"
    places = [*site.getsitepackages(), site.getusersitepackages()]
    files = [str(file) for place in places if (file := Path(place, name)).is_file()]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    active = _in_child(_START_UP, {**environment, PREFIX: "1"}) is True
    reason = ""
    if not active and files:
        reason = (
            "a child process did not execute it (an interpreter that reads no .pth files, such as "
            "python -S?)"
        )
    elif not active:
        reason = (
            f"{name} is not in this environment's site-packages; install the wheel, or install in "
            "editable mode again"
        )
    if not active and switch in ("on", "strict"):
        problems.append(f"{PREFIX} is set, but the start-up file is not active: {reason}")
    return {"active": active, "files": files, "reason": reason}


def _package(name: str, packages: tuple[str, ...]) -> dict[str, Any]:
    version = _versions.version_of(name, packages)
    package: dict[str, Any] = {"version": version}
    if version is not None and name == "wrapt":
        compiled = find_spec("wrapt._wrappers") is not None
        package["c_extension"] = compiled and not os.environ.get("WRAPT_DISABLE_EXTENSIONS")
    if version is not None and name == "transformer-engine":
        Progress.stage = "importing TransformerEngine"
        error = _in_child(_TRANSFORMER_ENGINE)
        package["import_error"] = "the import did not end" if error is None else error
    return package


def _predict(entry: Adapter, settings: Settings | None) -> tuple[FrameworkStatus, list[str]]:
    if settings is not None:
        return predict_status(entry, settings, _versions.version_of)
    version = _versions.version_of(entry.distribution, entry.packages)
    if version is None:
        return FrameworkStatus(None, "absent"), []
    return FrameworkStatus(version, "refused", reason=_NO_SETTINGS), []


def _limits(
    transformer_engine: Mapping[str, Any], frameworks: Mapping[str, FrameworkStatus]
) -> list[str]:
    """Return sentences on features that the installed TransformerEngine makes impossible."""
    version, error = transformer_engine["version"], transformer_engine.get("import_error")
    limits: list[str] = []
    for backend in _registry.backends():
        limit_of = pkgutil.resolve_name(backend.limits)
        limits += [
            limit_of(f"{name} {status.version}", status.seams, version, error)
            for name, status in frameworks.items()
        ]
    return list(filter(None, limits))


def _in_child(code: str, environment: Mapping[str, str] | None = None) -> Any:
    command = [sys.executable, *_flags(), "-c", code]
    env = {**os.environ, PREFIX: "0"} if environment is None else environment
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _flags() -> list[str]:
    """Return this interpreter's flags that change which files Python reads at its start."""
    names = {"isolated": "-I", "ignore_environment": "-E", "no_user_site": "-s", "no_site": "-S"}
    return [flag for name, flag in names.items() if getattr(sys.flags, name)]


def _text(
    found: Mapping[str, Any], frameworks: Mapping[str, FrameworkStatus], *, verbose: bool
) -> str:
    start_up = found["start_up"]
    lines = [f"precision_shim {found['precision_shim']['version']}"]
    lines += _row("in", found["precision_shim"]["path"])
    lines += _row("Python", f"{found['python']['version']}, {found['python']['executable']}")
    active = "active" if start_up["active"] else "not active"
    lines += _row("start-up file", f"{active}: {start_up['reason']}".removesuffix(": "))
    packages = found["packages"]
    here = [
        f"{name} {package['version']}"
        + " (pure Python: slower calls)" * (package.get("c_extension") is False)
        for name, package in packages.items()
        if package["version"]
    ]
    lines += _row("packages", ", ".join(here) or "none of those that matter here")
    missing = [name for name, package in packages.items() if not package["version"]]
    lines += _row("not installed", ", ".join(missing))
    for name, package in packages.items():
        if package.get("import_error"):
            lines += _short(_row(name, f"cannot be imported: {package['import_error']}"), verbose)

    variables = [f"{name}={value}" for name, value in found["variables"].items()]
    lines += ["", *_row("variables", ", ".join(variables) or "none is set")]
    if verbose and found["settings"]:
        lines += _row("settings", "strict" if found["strict"] else "not strict")
        for name, setting in found["settings"].items():
            lines += _row("", f"{name}={setting['value']}  ({setting['from']})")
        lines += _row("features", ", ".join(found["features"]) or "none")

    for name, status in frameworks.items():
        if status.state not in ("absent", "off"):
            lines += ["", *_framework_text(name, status, found["features"], verbose=verbose)]
    lines += _status_text.left_out(frameworks)

    if found["limits"]:
        lines += ["", "limits"]
        for limit in found["limits"]:
            lines += fold(limit, 2, 4)
    none = "no problems, but the limits above" if found["limits"] else "no problems"
    lines += ["", "problems" if found["problems"] else none]
    for problem in found["problems"]:
        lines += _short(fold(problem, 2, 4), verbose)
    lines += ["", *fold(found["verdict"], 0, 2)]
    return "\n".join(lines)


def _framework_text(
    name: str, status: FrameworkStatus, features: list[str], *, verbose: bool
) -> list[str]:
    if status.reason == _NO_SETTINGS:
        return fold(f"{name} {status.version}: {status.reason}", 0, 2)
    if not verbose:
        reason = status.reason if status.seams else ""  # which is among the problems otherwise
        headline = _status_text.headline(name, status, ahead=True)
        return fold(headline, 0, 2) + fold(reason, 2, 4)
    lines = _status_text.framework(name, status, features, ahead=True)
    return [*lines, "", *_status_text.seams(status.seams, _SHOWN)]


def _row(label: str, text: str) -> list[str]:
    return fold(f"{label:<{_COLUMN - 3}} {text}", 2, _COLUMN) if text else []


def _short(lines: list[str], verbose: bool) -> list[str]:
    if verbose or len(lines) <= _LONG:
        return lines
    indent = " " * (len(lines[1]) - len(lines[1].lstrip()))
    return [*lines[: _LONG - 1], f"{indent}... the rest: precision-shim doctor --verbose"]
