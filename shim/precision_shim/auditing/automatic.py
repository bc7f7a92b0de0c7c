"""Audit an optimizer automatically: when it is built, and after its first step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import InconsistentPrecisionError
from ..precision.effect import CODE, Written, without_effect
from ..precision.findings import Decision
from ..process.session import current_settings
from ..reporting import journal as _journal
from . import files, latest, loads
from .audits import look, where_of
from .readers import read_optimizers
from .record import Audit, Finding, updates_line
from .rules import NO_MASTER, UPDATES_LOST


def watch(
    framework: str,
    subject: str,
    optimizer: Any,
    *,
    inner: torch.optim.Optimizer | None = None,
    model: Any = None,
    scaler: tuple[Any, Callable[[Any], Any]] | None = None,
    by_user: Callable[[Finding], bool] | None = None,
    told: Callable[[Finding], bool] | None = None,
    fp32_key: str = "",
    wrote: Iterable[Written] = (),
) -> None:
    """Audit an optimizer now and after its first step that makes states.

    ``status()`` and ``PRECISION_SHIM_AUDIT_DIR`` get the audits. A problem causes a warning, in
    strict mode an error, unless ``by_user`` returns true for it. Weights without masters are what
    the user chose: rank 0 warns once, also in strict mode. A failure of the audit itself causes
    only a warning. A second call for the same optimizer adds ``wrote`` and audits again. With
    ``PRECISION_SHIM_WATCH_UPDATES``, lost updates are measured too.

    Args:
        framework: the framework's name; empty for none.
        subject: name of the model, such as ``"actor"``.
        optimizer: the optimizer, in any form that ``audit`` accepts.
        inner: the torch optimizer within that gets the step hook; ``None``: ``optimizer`` itself.
        model: the model, in any form that ``audit`` accepts; stored as a weak reference.
        scaler: the object that has the loss scaler of a torch optimizer, stored as a weak
            reference, and a function of this object that returns the loss scaler.
        by_user: function that returns whether the user's config caused a problem.
        told: function that returns whether the user has already been warned of a problem.
        fp32_key: see ``rules.find``.
        wrote: the dtypes that the user wrote for the model in the framework's config.

    Raises:
        InconsistentPrecisionError: the audit found a problem in strict mode.
    """
    stepped = optimizer if inner is None else inner
    if not isinstance(stepped, torch.optim.Optimizer):
        stepped = None  # a frozen model has a placeholder instead of an optimizer
    elif (watched := latest.of(stepped)) is not None:
        further = [one for one in wrote if one not in watched.wrote]
        if further:
            watched.wrote += tuple(further)
            watched.look()
        return
    several = model if isinstance(model, (list, tuple)) else [model]
    modules = [weakref.ref(module) for module in several if module is not None]
    watcher = _Watcher(
        framework,
        subject,
        weakref.ref(stepped) if stepped is not None else next(iter(modules), None),
        modules,
        tuple(wrote),
        optimizer=weakref.ref(optimizer),
        # A strong reference would keep a dropped engine's memory.
        scaler=None if scaler is None else (weakref.ref(scaler[0]), scaler[1]),
        by_user=by_user,
        told=told,
        fp32_key=fp32_key,
    )
    latest.add(watcher)
    every = current_settings()["watch_updates"]
    if stepped is not None and every:
        watcher.watch_updates(every)
    # Megatron's optimizers, and those with another function, choose their states' dtypes.
    loads_states = getattr(type(stepped), "load_state_dict", None)
    torchs = isinstance(optimizer, torch.optim.Optimizer)
    if stepped is not None and torchs and loads_states is torch.optim.Optimizer.load_state_dict:
        latest.at_clear(stepped.register_load_state_dict_pre_hook(watcher.before_load).remove)
    audit = watcher.look()
    if stepped is not None and audit is not None and not audit.complete:
        handle = stepped.register_step_post_hook(watcher.after_step)
        latest.at_clear(handle.remove)


def tell_without_effect(
    framework: str, subject: str, wrote: Iterable[Written], held: Mapping[str, Collection[str]]
) -> None:
    """Tell the dtypes without effect that the user wrote for a model without an optimizer.

    For ``held`` see ``effect.without_effect``.

    Raises:
        InconsistentPrecisionError: in strict mode.
    """
    where = where_of(framework, "")
    found = without_effect(tuple(wrote), held).problems
    said = [f"{subject}: {CODE}: {where}, {problem}" for problem in found]
    _raise_if_strict(said)
    for text in said:
        _journal.warn(text, stacklevel=None)


def _raise_if_strict(wrong: Sequence[str]) -> None:
    if wrong and current_settings().strict:
        raise InconsistentPrecisionError(
            f"{' '.join(wrong)} (precision_shim's audit under strict; take it away with "
            "PRECISION_SHIM_FEATURES=-audit)"
        )


@dataclass(eq=False, kw_only=True)
class _Watcher(latest.Watched):
    """Audits one optimizer; has only weak references to the optimizer and the model."""

    optimizer: weakref.ref[Any]
    scaler: tuple[weakref.ref[Any], Callable[[Any], Any]] | None = None
    by_user: Callable[[Finding], bool] | None = None
    told: Callable[[Finding], bool] | None = None
    _stem: str = ""
    _steps: int = 0
    _done: bool = False
    _said_figures: bool = False

    def before_load(self, optimizer: Any, state_dict: Any) -> None:
        """Tell which of the states that the optimizer is about to load are rounded."""
        names, strict = [self.framework] if self.framework else [], current_settings().strict
        loads.tell(
            loads.of_states(optimizer, state_dict), names, self.subject, [self.fp32_key], strict
        )

    def after_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Audit again after the steps 1, 2, 4, 8 and so on, until a step has made states."""
        # Do not remove the hook here: torch is iterating over the hooks while it calls this hook.
        self._steps += 1
        if self._done or self._steps & (self._steps - 1):
            return
        self._done = True  # also if the audit raises
        audit = self.look(last=self._steps == 1)
        self._done = audit is None or not audit.before_step

    def look(self, last: bool = False) -> Audit | None:
        """Make, store, write and report an audit; return ``None`` if the audit failed."""
        optimizer = self.optimizer()
        if optimizer is None:
            return None
        owner = self.scaler and self.scaler[0]()
        try:
            audit = look(
                self.modules() or None,
                optimizer,
                scaler=None if self.scaler is None or owner is None else self.scaler[1](owner),
                framework=self.framework,
                subject=self.subject,
                whole=False,
                fp32_key=self.fp32_key,
            )
        except Exception as error:  # a failed audit must not end the training run
            _journal.warn_or_say(f"the audit of {type(optimizer).__name__} failed: {error!r}")
            return None
        self._keep(audit)
        if last or audit.complete:
            _journal.log(f"{audit.whose}: audit: {audit.brief()}")
        self._judge(audit)
        return audit

    def watch_updates(self, every: int) -> None:
        """Attach a meter of updates lost to rounding; on failure, warn that nothing is measured."""
        names = {"framework": self.framework, "subject": self.subject}
        try:
            from .updates import attach

            for reading in read_optimizers(self.modules() or None, self.optimizer(), whole=False):
                attach(reading, every, on_figures=self.take_figures, **names)
        except Exception as error:  # a failed measurement must not end the training run
            _journal.warn_or_say(
                f"{self.framework} {self.subject}: lost updates are not measured: {error!r}"
            )

    def take_figures(self, meter: Any) -> None:
        """Put a meter's measurements into the stored audit; print only the first measurements."""
        figures, audit = meter.figures, self.audit
        if figures is None or audit is None:
            return
        parts = {part.name: part for part in audit.parts}
        parts[meter.part] = replace(parts[meter.part], updates=figures)
        notes = [one for one in audit.notes if (one.code, one.part) != (UPDATES_LOST, meter.part)]
        notes += meter.notes
        audit = replace(audit, parts=tuple(parts.values()), notes=tuple(notes))
        self._keep(audit)
        if not self._said_figures:
            self._said_figures = True
            _journal.log(f"{audit.whose}: {updates_line(figures)}")

    def _judge(self, audit: Audit) -> None:
        _raise_if_strict(
            [
                problem.message
                for problem in audit.problems
                if problem.code != NO_MASTER and not (self.by_user and self.by_user(problem))
            ]
        )
        for problem in audit.problems:
            code, message = problem.code, problem.message
            if code == NO_MASTER:
                chosen = Decision(audit.framework, audit.subject, "audit", code, message)
                _journal.record(chosen, warns=True)
            elif not (self.told and self.told(problem)):
                _journal.warn(f"{audit.subject or 'audit'}: {code}: {message}", stacklevel=None)

    def _keep(self, audit: Audit) -> None:
        """Store an audit, and write it into ``PRECISION_SHIM_AUDIT_DIR``."""
        self.audit = audit
        directory = current_settings()["audit_dir"]
        if not directory:
            return
        self._stem = self._stem or latest.name(files.stem(audit))
        try:
            files.write(directory, self._stem, audit)
            self.not_written = ""
        except OSError as error:
            self.not_written = files.not_written(directory, error)
            _journal.warn_or_say(self.not_written)
