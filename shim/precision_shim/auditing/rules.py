"""Find problems (contradictions between a ``Reading`` and the config) and notes (other risks)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..errors import AuditError, DtypeError
from ..precision.dtypes import accepted_names, any_dtype, name_of
from ..precision.effect import CODE, Written, without_effect
from ..precision.moments import LAST_COUNTS, second_moment_can_decay
from ..precision.updates import without_masters
from .reading import SIXTEEN_BIT, Reading, Wanted
from .record import COMPONENTS, AuditPart, Finding

NOTHING = "none"

UPDATES_LOST = "updates-lost"
_TOO_MANY = 0.5  # a larger share of lost updates of the stored weights is noted
NO_MASTER = "no-master"
"""Code of 16-bit weights that an optimizer of torch's updates without masters."""


def parse_expected(expected: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the dtypes that a caller expects, by component, as canonical names."""
    found = {}
    for component, dtype in (expected or {}).items():
        if component not in COMPONENTS:
            raise AuditError(
                f"audit(expected=...): unknown component {component!r}; allowed: "
                f"{', '.join(COMPONENTS)}. Correct the name or leave it out."
            )
        accepted = any_dtype(dtype)
        if accepted is None:
            raise DtypeError(
                f"audit(expected=...): {component}={dtype!r} is not a dtype name; allowed: "
                f"{accepted_names()}, int16 (remainders), or a torch.dtype. Correct it."
            )
        # Among names of a config uint8 means fp8; a live tensor's bytes may be codes instead.
        found[component] = "uint8" if str(dtype).endswith("uint8") else name_of(accepted)
    return found


_Fault = tuple[str, "str | None", str, str, str]
"""Code, component, the expected dtype, what was found, and the remedy."""


def find(
    reading: Reading,
    part: AuditPart,
    expected: Mapping[str, str],
    where: str,
    fp32_key: str = "",
    *,
    wrote: Collection[Written] = (),
) -> tuple[list[Finding], list[Finding]]:
    """Return the problems of a part and its notes.

    A problem contradicts a config or ``expected``; a note puts the training's precision at risk.

    Args:
        reading: the optimizer.
        part: the ``AuditPart`` that was made from the reading.
        expected: dtypes that the caller expects, by component; they override the config's dtypes.
        where: framework and version, for messages.
        fp32_key: the config key, with its value, that keeps the parameters in fp32.
        wrote: the dtypes that the user wrote in the framework's config.
    """

    def findings(faults: Iterable[_Fault]) -> list[Finding]:
        found = []
        for code, component, should_be, there, remedy in faults:
            place = ", ".join(word for word in (where, part.name, component) if word)
            message = f"{place}: expected {should_be}, found {there}: {remedy}."
            found.append(Finding(code, part.name, component, should_be, there, message))
        return found

    problems, notes = [*_problems(reading, part, expected, wrote)], [*_notes(reading)]
    bare, most = _no_master(reading, fp32_key)
    if bare:
        (problems if most else notes).insert(0, (NO_MASTER, "master", "fp32", NOTHING, bare))
    if part.scaler is None and any(p.dtype is torch.float16 for p in reading.trainable):
        judged = reading.wanted is not None or reading.scaler is not None
        (problems if judged else notes).append(_no_scaler(reading))
    lost = lost_updates(part.updates, part.name, f"{where}, {part.name}") if part.updates else ()
    return findings(problems), [*findings(notes), *lost]


def _problems(
    reading: Reading, part: AuditPart, expected: Mapping[str, str], wrote: Collection[Written]
) -> Iterator[_Fault]:
    held = {name: component.dtypes for name, component in part.components.items()}
    held.update({name: (name_of(dtype),) for name, dtype in reading.mixed.items()})
    seen = set(expected)
    by_key = {one.key: one for one in wrote}
    for fault in without_effect(wrote, held).problems:
        one = by_key[fault.key]
        seen.add(one.sets)
        found = "+".join(one.in_force(held)) or NOTHING
        yield CODE, one.sets or None, one.dtype or "an effect", found, str(fault).rstrip(".")
    for low in _low_step_counts(reading):
        remedy = f"in {low} it stands still at {LAST_COUNTS[low]}: keep each state's 'step' in fp32"
        yield "step-count", None, "a step count in fp32", low, remedy
    for component, dtype in expected.items():
        there = part.components[component]
        unknown = there.state == "later" and not there.dtypes  # before the first step
        as_meant = unknown or there.dtypes in ((dtype,), ("fp8",) if dtype == "uint8" else (dtype,))
        if not as_meant and (there.dtypes or reading.owned):
            found = "+".join(there.dtypes) or NOTHING
            yield "unexpected-dtype", component, dtype, found, "as audit(expected=...) has it"
    if reading.wanted is not None:
        yield from (one for one in _contradictions(reading, reading.wanted) if one[1] not in seen)


def _no_scaler(reading: Reading) -> _Fault:
    vanish, should_be, found = "fp16 gradients vanish without one", "a loss scaler", NOTHING
    if reading.wanted is not None:
        vanish = reading.wanted.remedy("scaler-missing", "fp16")
    elif reading.scaler is not None:
        should_be, found = f"{should_be} that is on", f"{type(reading.scaler).__name__}, turned off"
    else:
        vanish += "; audit() saw none, pass it as scaler= if there is one"
    return "scaler-missing", "params", should_be, found, vanish


def _low_step_counts(reading: Reading) -> list[str]:
    states = (state for stepper in reading.steppers for state in stepper.state.values())
    steps = {name_of(one["step"].dtype) for one in states if hasattr(one.get("step"), "dtype")}
    return sorted(steps & LAST_COUNTS.keys())


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return "+".join(sorted(map(name_of, set(dtypes)))) or NOTHING


def _contradictions(reading: Reading, wanted: Wanted) -> Iterator[_Fault]:
    def fault(code: str, whose: str | None, should_be: str, found: str, **words: str) -> _Fault:
        return code, whose, should_be, found, wanted.remedy(code, should_be, **words)

    # The gradients of fp32 parameters are fp32, regardless of the config.
    main_grads_of = {torch.float32: torch.float32, **dict.fromkeys(SIXTEEN_BIT, wanted.main_grads)}
    views = reading.bucket_views
    pairs = {(p.dtype, views[id(p)].dtype) for p in reading.trainable if id(p) in views}
    for must in dict.fromkeys(main_grads_of.values()):
        others = {found for dtype, found in pairs if main_grads_of.get(dtype) is must} - {must}
        if must is not None and others:
            yield fault("main-grads-dtype", "grad_buckets", name_of(must), _names(others))
    for moment in ("exp_avg", "exp_avg_sq"):
        should_be: torch.dtype | None = getattr(wanted, moment)
        states = (getattr(state, moment) for state in reading.owned)
        held = {value.dtype for value in states if value is not None} | reading.later(moment)
        if should_be is not None and held - {should_be}:
            words = {"component": moment, "optimizer": reading.optimizer}
            yield fault(
                "moment-dtype", moment, name_of(should_be), _names(held - {should_be}), **words
            )
    yield from _masters(reading, wanted.masters, fault)
    for (asked, computes), names in reading.routers.items():
        if asked != computes:
            yield fault("router-dtype", None, asked, computes, names=names)
    if wanted.params is None:
        return
    params = {p.dtype for p in reading.trainable if p.dtype.is_floating_point}
    # A model may keep some parameters in fp32, such as a router's weights.
    wrong = params - {wanted.params, torch.float32}
    if wanted.params is not torch.float32 and params == {torch.float32}:
        wrong = params
    if wrong:
        yield fault("params-dtype", "params", name_of(wanted.params), _names(wrong))


def _masters(
    reading: Reading, wanted: Mapping[torch.dtype, torch.dtype], fault: Callable[..., _Fault]
) -> Iterator[_Fault]:
    declared = reading.declared_states.master
    lacking: list[torch.dtype] = []
    wrong: dict[tuple[str, str], None] = {}
    for state in reading.owned:
        if state.dtype not in wanted:
            continue
        found: torch.dtype | None = None
        if state.masters:
            found = state.masters[0].dtype
        elif declared is not None and not state.has_state:
            found = declared(state.dtype)
        if found is None:
            lacking.append(state.dtype)
        elif found is not wanted[state.dtype]:
            wrong[name_of(wanted[state.dtype]), name_of(found)] = None
    if lacking:
        should_be = _names(wanted[dtype] for dtype in lacking)
        without = f"none for {len(lacking)} of {len(reading.owned)} tensors"
        yield fault("master-missing", "master", should_be, without, params=_names(lacking))
    for should_be, held in wrong:
        yield fault("master-dtype", "master", should_be, held)


def _no_master(reading: Reading, fp32_key: str = "") -> tuple[str, bool]:
    """Return what weights without masters lose, if there are any, and whether that is most."""
    declared = reading.declared_states.master
    kept = {torch.int16, torch.float32, torch.float64}  # remainders and whole masters
    bare = [state for state in reading.owned if state.dtype in SIXTEEN_BIT]
    bare = [state for state in bare if kept.isdisjoint(copy.dtype for copy in state.masters)]
    bare = [s for s in bare if s.has_state or declared is None or declared(s.dtype) not in kept]
    if reading.keeps_small_updates:
        bare = [state for state in bare if state.dtype is not torch.bfloat16]
    if reading.wanted is not None or not bare:
        return "", False
    least = min((state for state in bare if state.lr), key=lambda state: state.lr, default=None)
    lost, most = "updates below half a bit of a weight round away", False
    if least is not None:
        lost, most = without_masters(least.lr, name_of(least.dtype))
    return (
        f"the optimizer steps {_names(state.dtype for state in bare)} parameters themselves, and "
        f"{lost}: keep the parameters in fp32 ({fp32_key and f'{fp32_key}; '}FSDP's mixed "
        "precision computes in 16 bits all the same) or use an optimizer with masters"
    ), most


def _notes(reading: Reading) -> Iterator[_Fault]:
    declared = reading.declared_states.master
    copy = declared(torch.float32) if declared is not None else None
    if copy is not None and {state.dtype for state in reading.owned} == {torch.float32}:
        yield (
            "master-copied",
            "master",
            f"{NOTHING} beside fp32 parameters",
            name_of(copy),
            f"{reading.optimizer} keeps a second copy of parameters that are fp32 already, and "
            "never updates it: make the optimizer without masters",
        )
    second = {state.exp_avg_sq.dtype for state in reading.owned if state.exp_avg_sq is not None}
    second |= reading.later("exp_avg_sq")
    stuck = [b for b in reading.betas if len(b) > 1 and not second_moment_can_decay(b[1])]
    if torch.bfloat16 in second and stuck:
        yield (
            "second-moment-stuck",
            "exp_avg_sq",
            "fp32, or beta2 of at most 0.99",
            f"bf16 at beta2 {stuck[0][1]:g}",
            "a bf16 second moment cannot decay there, because 1 - beta2 is not above 2^-8",
        )


def lost_updates(figures: Mapping[str, Any], part: str, where: str) -> Iterator[Finding]:
    """Yield the note that rounding loses most updates of the stored weights."""
    share = figures["weights"]
    if share is None or share <= _TOO_MANY:
        return
    stored = figures["dtypes"]["weights"]
    if {"bf16", "fp16"}.intersection(stored.split(", ")):
        remedy = (
            "such updates are below half a bit of a 16-bit weight. Keep the weights in fp32 "
            "(FSDP's mixed precision computes in 16 bits all the same; Megatron keeps masters "
            "where the OptimizerConfig has bf16 or fp16), use an optimizer with masters, or raise "
            "the learning rate"
        )
    else:
        remedy = (
            "such updates are below half a bit of a 32-bit weight, so that no dtype helps. Raise "
            "the learning rate, or look for parameters that only their weight decay moves"
        )
    wanted, found = f"at most {_TOO_MANY:.0%} lost", f"{share:.1%} lost"
    message = (
        f"{where}: {share:.1%} of the updates of the stored weights ({stored}) were "
        f"rounded away at step {figures['step']}, expected {wanted}: {remedy}."
    )
    yield Finding(UPDATES_LOST, part, "params", wanted, found, message)
