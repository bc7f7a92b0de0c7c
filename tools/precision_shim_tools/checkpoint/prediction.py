"""Predict how a resume in this environment ends, and find a setting that makes the resume exact.

The adapter whose seams load a kind of checkpoint also predicts its resume.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from precision_shim.errors import PrecisionShimError
from precision_shim.precision.moments import LAST_COUNTS
from precision_shim.process import settings as _settings
from precision_shim.process.registry import backends, checkpoints, names, records
from precision_shim.process.settings import Settings

from .layout import CheckpointPart, Outcome, halves

if TYPE_CHECKING:
    from ..predicted import Groups


@dataclass(frozen=True)
class Here:
    """The environment of a resume.

    Attributes:
        on: whether the shim is on.
        settings: the shim's settings.
        config: the optimizer fields of the job's config, and those in ``Config.beside``.
        instead: fields that override fields of ``config``, even if ``config`` is ``None``.
        refused: the groups of seams that would be refused, by the features that the settings name.
    """

    on: bool
    settings: Settings
    config: Mapping[str, Any] | None = None
    instead: Mapping[str, Any] = field(default_factory=dict)
    refused: dict[tuple[str, ...], Groups] = field(default_factory=dict, compare=False)

    @classmethod
    def now(cls, config: Mapping[str, Any] | None = None) -> Here:
        """Return this process's environment if the shim is installed, else a child process's.

        Raises:
            SettingsError: a variable has an invalid value.
        """
        session = sys.modules.get("precision_shim.process.session")  # slow to import
        if session is not None and session.is_installed():
            return cls(True, session.current_settings(), config)
        on = _settings.switch() in ("on", "strict")
        return cls(on, _settings.resolve(known_frameworks=names()), config)

    def in_force(self, framework: str, feature: str, group: str) -> bool:
        """Whether the seams of ``group`` would make ``feature`` work in this environment."""
        if not self.on:
            return False
        from ..predicted import PredictedFeatures  # slow to import

        groups = self.refused.setdefault(self.settings.features, {})
        return PredictedFeatures(self.settings, groups).in_force(framework, feature, group)


def only_framework(kind: str) -> str:
    """Return the one installed framework that loads ``kind`` files; empty for 0 or several."""
    loads = [name for name, row in checkpoints().items() if kind in row.resuming]
    installed = [name for name in loads if _is_installed(name)]
    return installed[0] if len(installed) == 1 else ""


def _is_installed(framework: str) -> bool:
    from precision_shim.process.versions import version_of  # slow to import

    entry = records()[framework]
    return version_of(entry.distribution, entry.packages) is not None


def predict_resume(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a resume from a model's checkpoint ends in the environment ``here``."""
    outcome = _predict(part, here)
    tensors = (pair for unit in part.units for pair in unit.tensors.items())
    low = {one.dtype for key, one in tensors if key.endswith(".step")} & LAST_COUNTS.keys()
    if low and outcome.exact:
        outcome = Outcome("misread", f"its step count, in {'+'.join(low)}, stands still")
    # The rules are those of Adam's states; and a file may contain what seems to be missing.
    doubt = part.unknown and (outcome.exact or halves(part) or any(part.unknown.values()))
    if not doubt or outcome.verdict == "not here":
        return outcome
    names = sorted(part.unknown)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return Outcome("not known", f"no rule covers {', '.join(names[:8])}{more}")


def _predict(part: CheckpointPart, here: Here) -> Outcome:
    row = checkpoints().get(part.framework)
    if row is None:
        return Outcome(
            "not here", "whose it is does not show in its directories; say so with --framework"
        )
    if find_spec("torch") is None:
        return Outcome("not here", "torch is not installed here")
    if not _is_installed(part.framework):
        return Outcome("not here", f"{part.framework} is not installed here")
    place = row.resuming.get(part.kind)
    if place is None:
        return Outcome("not here", f"{part.framework} resumes from no such files")
    try:
        outcome: Outcome = pkgutil.resolve_name(place)(part, here)
    except PrecisionShimError as error:  # the installed packages do not support a config value
        return Outcome("fails", str(error).rstrip("."))
    return outcome


def remedy(part: CheckpointPart, here: Here) -> str:
    """Return the first setting with which the predicted resume is exact; empty if there is none."""
    exact = (text for text, other in _others(here) if predict_resume(part, other).exact)
    return next(exact, "")


def _others(here: Here) -> Iterator[tuple[str, Here]]:
    shimmed, settings = replace(here, on=True), here.settings
    on = "" if here.on else "PRECISION_SHIM=1 "
    if not here.on:
        yield "PRECISION_SHIM=1", shimmed
    configured = replace(
        settings,
        values={**settings.values, "optimizer_states": "as-configured"},
        origin={**settings.origin, "optimizer_states": "argument"},
    )
    yield (
        f"{on}PRECISION_SHIM_OPTIMIZER_STATES=as-configured",
        replace(shimmed, settings=configured),
    )
    for fields in (remedy for backend in backends() for remedy in backend.config.remedies):
        text = " ".join(f"{key}: {str(value).lower()}" for key, value in fields.items())
        yield f"{on}{text} in the optimizer's config", replace(shimmed, instead=fields)
    for name in ("growth_interval", "growth_factor", "backoff_factor"):
        if settings.is_set(name):
            unset = replace(settings, origin={**settings.origin, name: "default"})
            yield f"{on}PRECISION_SHIM_{name.upper()} unset", replace(shimmed, settings=unset)
    if here.on:
        yield "PRECISION_SHIM=0", replace(here, on=False)
