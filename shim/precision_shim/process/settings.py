"""The table of all settings, each with its variable, default and parser.

Arguments of ``install()`` override variables, variables override defaults, and ``PRECISION_SHIM=0``
(the operator's kill switch) overrides everything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingsError
from .names import OFF, ON, VARIABLE

PREFIX = VARIABLE

FEATURES = (
    "dtype-coercion",
    "bf16-dispatch",
    "grad-bucket-alignment",
    "fp16-scaling",
    "rollout-agreement",
    "audit",
)
"""Names of the features, in the order in which status and documentation show them."""
_, _DISPATCH, _ALIGNMENT, _SCALING, AGREEMENT, _ = FEATURES


def _choice(*allowed: str) -> Callable[[str, object], str]:
    def parse(name: str, value: object) -> str:
        text = str(value).strip().lower()
        if text not in allowed:
            raise _bad(name, value, " | ".join(allowed))
        return text

    return parse


_LARGEST = 3.4e38  # a loss scale is an fp32 number


def _number(low: float, high: float = math.inf) -> Callable[[str, object], float]:
    def parse(name: str, value: object) -> float:
        number = _float(value)
        if not low < number < high:
            below = f" and < {high:g}" if high != math.inf else ""
            raise _bad(name, value, f"a finite number > {low:g}{below}")
        return number

    return parse


def _whole(low: int) -> Callable[[str, object], int]:
    def parse(name: str, value: object) -> int:
        number = _float(value)
        if not number.is_integer() or number < low:
            raise _bad(name, value, f"a whole number >= {low}")
        return int(number)

    return parse


def _float(value: object) -> float:
    """Convert a value; NaN, to which every comparison is false, if it is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _directory(name: str, value: object) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise _bad(name, value, "a path")
    text = value.strip() if isinstance(value, str) else os.fsdecode(value)
    if "\0" in text:  # file systems and environments accept no NUL
        raise _bad(name, value, "a path without a null character")
    # Workers start in other directories, where a relative path would name another directory.
    path = os.path.abspath(os.path.expanduser(text)) if text else ""
    if path and os.path.exists(path) and not os.path.isdir(path):
        raise _bad(name, value, "a directory, which is made where it is missing")
    return path


def _bad(name: str, value: object, allowed: str) -> SettingsError:
    return SettingsError(
        f"{_variable(name)}={value!r} is not a valid setting; allowed: {allowed}. "
        f"Correct it (environment variable {_variable(name)}, or settings={{{name!r}: ...}} in "
        "install()), or unset it for the default."
    )


def _variable(name: str) -> str:
    return f"{PREFIX}_{name.upper()}"


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings.

    Attributes:
        parse: converts a value, or raises a ``SettingsError``.
        feature: the feature that reads the setting; empty if every job uses the setting.
    """

    name: str
    default: Any
    parse: Callable[[str, object], Any]
    feature: str = ""

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return _variable(self.name)


TABLE: Mapping[str, Setting] = {
    row.name: row
    for row in (
        Setting(
            "optimizer_states", "auto", _choice("auto", "follow-model", "as-configured"), _DISPATCH
        ),
        Setting("grad_bucket", "unless-set", _choice("unless-set", "align"), _ALIGNMENT),
        Setting("rollout", "tell", _choice("tell", "follow"), AGREEMENT),
        Setting("head", "as-configured", _choice("as-configured", "fp32"), AGREEMENT),
        Setting("loss_scale_init", 65536.0, _number(0.0, _LARGEST), _SCALING),
        Setting("growth_interval", 400, _whole(1), _SCALING),
        Setting("growth_factor", 2.0, _number(1.0), _SCALING),
        Setting("backoff_factor", 0.5, _number(0.0, 1.0), _SCALING),
        Setting("audit_dir", "", _directory),
        Setting("watch_updates", 0, _whole(0)),
        Setting("log", "info", _choice("quiet", "info", "debug")),
    )
}


@dataclass(frozen=True)
class Settings:
    """The settings in force in this process, and the origin of each value.

    Attributes:
        origin: maps a setting's name to ``"argument"``, ``"variable"`` or ``"default"``.
        features: names of the features in force.
        frameworks: the frameworks that the user named; ``None`` if the user named none.
        strict: whether a refused seam raises an error.
        given: the arguments of ``install()`` as environment variables, for child processes.
    """

    values: Mapping[str, Any]
    origin: Mapping[str, str]
    features: tuple[str, ...]
    frameworks: tuple[str, ...] | None
    strict: bool
    given: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def effective(self) -> tuple[object, ...]:
        """Return a tuple for comparing installations: all settings, and which ones the user set."""
        given = {name for name in self.origin if self.is_set(name)}
        return dict(self.values), given, self.features, self.frameworks, self.strict

    def is_set(self, name: str) -> bool:
        """Whether the user set the setting, as an argument or a variable."""
        return self.origin[name] != "default"


def idle(settings: Settings, features: Collection[str]) -> list[Setting]:
    """Return the user's settings that none of ``features``, those in force, reads."""
    return [
        row
        for row in TABLE.values()
        if row.feature and row.feature not in features and settings[row.name] != row.default
    ]


def switch(environ: Mapping[str, str] | None = None) -> str:
    """Return the state of ``PRECISION_SHIM``: ``"on"``, ``"strict"``, ``"off"`` or ``"unset"``.

    Raises:
        SettingsError: the value is not allowed.
    """
    text = (os.environ if environ is None else environ).get(PREFIX, "").strip().lower()
    states = {"": "unset", "strict": "strict"} | dict.fromkeys(ON, "on") | dict.fromkeys(OFF, "off")
    if text in states:
        return states[text]
    raise SettingsError(
        f"{PREFIX}={text!r} is not a valid setting; allowed: {'/'.join(ON)} (on), strict, "
        f"{'/'.join(OFF)} (off), or unset. Correct it or unset it."
    )


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise an error for unknown variables with our prefix, which are most likely misspelt.

    Raises:
        SettingsError: a variable is unknown; the message suggests the nearest allowed variable.
    """
    allowed = [
        f"{PREFIX}_FEATURES",
        f"{PREFIX}_FRAMEWORKS",
        *(setting.variable for setting in TABLE.values()),
    ]
    unknown = sorted(
        name for name in environ if name.startswith(f"{PREFIX}_") and name not in allowed
    )
    if unknown:
        meant = [near for name in unknown if (near := _nearest(name, allowed))]
        question = f"; did you mean {', '.join(dict.fromkeys(meant))}?" if meant else "."
        raise SettingsError(
            f"{', '.join(unknown)} is no variable of precision_shim{question} Allowed: "
            f"{', '.join(allowed)}. Correct the name or unset it."
        )


def _nearest(name: str, allowed: Iterable[str]) -> str:
    from difflib import get_close_matches  # slow, and needed only for an error

    # Compare without the common prefix, which would make any two names look alike.
    rest = {variable.removeprefix(f"{PREFIX}_"): variable for variable in allowed}
    word = name.removeprefix(f"{PREFIX}_")
    begun = [begins for begins in rest if word and begins.startswith(word)]
    found = get_close_matches(word, rest, n=1) or begun
    return rest[found[0]] if found else ""


def _suggest(name: str, allowed: Iterable[str]) -> str:
    near = _nearest(name, allowed)
    return f" (did you mean {near}?)" if near else ""


def unknown_argument(name: str) -> SettingsError:
    """Return the error for an argument that ``install()`` does not have."""
    allowed = (*BY_CALL, "strict", "export")
    near, how = _nearest(name, (*allowed, *TABLE)), "Correct the name or leave it out."
    if near in TABLE:
        how = f"{near} is a setting: install(settings={{{near!r}: ...}}), or {_variable(near)}=..."
    elif near:
        how = f"Did you mean {near}?"
    return SettingsError(
        f"install(): unknown argument {name!r}; allowed: {', '.join(allowed)}. {how}"
    )


BY_CALL: Mapping[str, str] = {
    "features": "install(features=...)",
    "frameworks": "install(frameworks=...)",
    "settings": "install(settings=...)",
}
"""Maps an argument of ``resolve`` to its name in messages to users of ``install()``."""


def parse_features(
    value: str | Iterable[str], variable: str = f"{PREFIX}_FEATURES"
) -> tuple[str, ...]:
    """Parse a list of features; ``-name`` excludes a feature (as first entry: from all features).

    Raises:
        SettingsError: a name is unknown.
    """
    names = _words(value, variable)
    chosen: list[str] = []
    for position, name in enumerate(names):
        taken, bare = name.startswith("-"), name.lstrip("-")
        if bare not in FEATURES:
            raise SettingsError(
                f"{variable}: unknown feature {bare!r}{_suggest(bare, FEATURES)}; allowed: "
                f"{', '.join(FEATURES)}, each also with a leading '-' to take it away from all. "
                "Correct the list or unset it for all."
            )
        if taken and position == 0:
            chosen = list(FEATURES)
        if taken:
            chosen = [other for other in chosen if other != bare]
        elif bare not in chosen:
            chosen.append(bare)
    if not names and isinstance(value, str):
        return FEATURES  # an empty variable counts as unset; only features=[] selects no feature
    return tuple(name for name in FEATURES if name in chosen)


def _words(value: object, where: str) -> list[str]:
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise SettingsError(
            f"{where}: {value!r} is no list of names; allowed: a list of strings, or one string "
            "with commas. Correct it or leave it out for all."
        )
    parts = value.split(",") if isinstance(value, str) else list(value)
    return [word for word in (str(part).strip().lower() for part in parts) if word]


def resolve(
    *,
    features: str | Iterable[str] | None = None,
    frameworks: str | Iterable[str] | None = None,
    strict: bool | None = None,
    settings: Mapping[str, object] | None = None,
    known_frameworks: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    where: Mapping[str, str] = BY_CALL,
) -> Settings:
    """Combine arguments of ``install()``, variables and defaults into a process's settings.

    ``known_frameworks`` are the allowed names, read only if the user names a framework; any name is
    allowed if it is empty. ``environ`` is the environment, ``None`` for the process's. ``where``
    names ``features``, ``frameworks`` and ``settings`` in messages.

    Raises:
        SettingsError: an argument or a variable has an unknown name or an invalid value.
    """
    env = os.environ if environ is None else environ
    check_variables(env)
    if strict not in (None, True, False):  # "no" would count as true
        raise SettingsError(
            f"install(strict=...): {strict!r} is not a valid setting; allowed: True, False, or "
            f"None for what {PREFIX} says. Correct it or leave it out."
        )
    if not isinstance(settings, (Mapping, type(None))):
        raise SettingsError(
            f"{where['settings']}: {settings!r} is no mapping; allowed: a dict with the names "
            f"{', '.join(TABLE)}. Correct it or leave it out."
        )
    arguments = dict(settings or {})
    unknown = sorted(str(name) for name in arguments if name not in TABLE)
    if unknown:
        raise SettingsError(
            f"{where['settings']}: unknown setting {unknown[0]!r}{_suggest(unknown[0], TABLE)}; "
            f"allowed: {', '.join(TABLE)}. Correct the name or leave it out."
        )
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    given: dict[str, str] = {}
    for name, row in TABLE.items():
        if name in arguments:
            try:
                values[name], origin[name] = row.parse(name, arguments[name]), "argument"
            except SettingsError as error:
                raise SettingsError(f"{where['settings']}: {error}") from None
            given[row.variable] = str(values[name])
        elif env.get(row.variable, "").strip():
            values[name], origin[name] = row.parse(name, env[row.variable]), "variable"
        else:
            values[name], origin[name] = row.default, "default"

    def asked(name: str, argument: str | Iterable[str] | None) -> tuple[str | Iterable[str], str]:
        variable = _variable(name)
        return (env.get(variable, ""), variable) if argument is None else (argument, where[name])

    chosen = parse_features(*asked("features", features))
    if features is not None:
        given[f"{PREFIX}_FEATURES"] = ",".join(chosen or [f"-{name}" for name in FEATURES])

    raw, source = asked("frameworks", frameworks)
    named = tuple(dict.fromkeys(_words(raw, source))) or None  # the user named none
    allowed = tuple(known_frameworks) if named else ()
    for name in named or ():
        if allowed and name not in allowed:
            raise SettingsError(
                f"{source}: unknown framework {name!r}{_suggest(name, allowed)}; allowed: "
                f"{', '.join(sorted(allowed))}. Correct the list or unset it for all."
            )
    if frameworks is not None and (named or env.get(f"{PREFIX}_FRAMEWORKS", "").strip()):
        # An empty variable, which child processes read, means all frameworks.
        given[f"{PREFIX}_FRAMEWORKS"] = ",".join(named or ())
    return Settings(
        values=values,
        origin=origin,
        features=chosen,
        frameworks=named,
        strict=(switch(env) == "strict") if strict is None else bool(strict),
        given=given,
    )
