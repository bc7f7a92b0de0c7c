"""``ScaledTraining``: loss scaler, steps, metrics and checkpoints of one model in fp16."""

from __future__ import annotations

import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from precision_shim import errors, scaling
from precision_shim.adapting import current_settings, decide, holding, versioned, warn
from precision_shim.scaling import FILE_NAME, Files, LossScaler, ScalerSettings

from .settings import FEATURE, chosen, settings_for
from .states import fault_of_moments
from .stepping import NormsInFp32, ScaledLoss, gradients_of, moves_nothing, note_skip, steps_through

_ATTRIBUTE = "_precision_shim_training"
"""Attribute of a framework's object: ``keep`` sets it, and ``of`` reads it."""

_current: ContextVar[ScaledTraining | None] = ContextVar("precision_shim_training", default=None)


class ScaledTraining:
    """Training with loss scaling of one model that has a torch optimizer.

    An adapter calls ``make``, ``keep`` and ``guard`` where the framework makes the optimizer, and
    ``attach`` or ``scaled`` where it computes the loss. The adapter enters ``one_step`` around a
    function that clips and steps once; around a loop of several steps, ``several_steps``, with
    ``before_clipping`` around each clipping. ``norm`` and ``metrics`` are for the metrics; ``save``
    and ``restore``, or ``record`` and ``restore_record``, for checkpoints.

    Attributes:
        framework: the framework's name.
        subject: the model's name, such as ``"actor"``.
        scaler: a ``LossScaler``, or the framework's or user's scaler, which stays unchanged.
        drives: whether the shim scales and steps; else the methods for both do nothing.
    """

    def __init__(
        self, framework: str, subject: str, scaler: GradScaler, *, drives: bool = True
    ) -> None:
        self.framework, self.subject = framework, subject
        self.scaler, self.drives = scaler, drives
        self._optimizer: Optimizer | None = None  # set only within ``several_steps``
        self._skipped = False
        self._watched: WeakSet[Optimizer] = WeakSet()
        self._held = False  # whether the last backward pass left gradients
        self._guard: tuple[Any, ...] = (lambda: None), "", None, ""

    @classmethod
    def make(
        cls,
        framework: str,
        subject: str,
        *,
        device: str,
        because: str,
        configured: Mapping[str, Any] | None = None,
        framework_default: ScalerSettings | None = None,
        process_group: dist.ProcessGroup | None = None,
        drives: bool = True,
    ) -> ScaledTraining:
        """Make a ``ScaledTraining`` with the shim's loss scaler, and report the decision.

        ``device`` is the gradients' device type. ``because`` is why the shim scales the loss. The
        ranks of ``process_group`` (``None``: all) skip a step together. For ``configured`` and
        ``framework_default`` see ``settings_for``; for ``drives`` see the class.
        """
        settings = settings_for(configured, framework_default)
        decide(framework, subject, FEATURE, chosen(settings), because)
        scaler = LossScaler(settings, device=device, process_group=process_group)
        training = cls(framework, subject, scaler, drives=drives)
        scaler.check_first(training._refuse_moments)
        scaler.check_each(training._before_backward)
        return training

    def _refuse_moments(self, optimizer: Optimizer) -> None:
        fault = fault_of_moments(optimizer)
        if fault:
            raise errors.UnsupportedPrecisionError(
                f"{self._where}: {self.subject}: {fault}. Keep the parameters in fp32, or set an "
                "eps above 3e-8."
            )

    def keep(self, owner: Any, attribute: str = "") -> ScaledTraining:
        """Store this object on a framework's object, from which ``of`` returns it.

        If ``attribute`` is given, the owner's attribute of this name, which is for the framework's
        own scaler, gets the shim's.
        """
        setattr(owner, _ATTRIBUTE, self)
        if attribute:
            setattr(owner, attribute, self.scaler)
        return self

    def guard(
        self, owner: Any, step: str, optimizers: Callable[[Any], Iterable[Any]], package: str = ""
    ) -> None:
        """Raise an error before torch's optimizer takes a step with scaled gradients.

        Also raise it before a backward pass, if the last gradients were dropped, and the function
        that steps is not the framework's own. A framework's function may drop gradients.

        Args:
            owner: the framework's object that steps.
            step: the path of the function that steps, in ``owner``.
            optimizers: returns the owner's optimizers; called when a backward pass begins.
            package: the package of the framework's function, if not the framework's name.
        """
        package = package or self.framework.replace("-", "_")
        self._guard = weakref.ref(owner), step, optimizers, package

    def _watch(self, optimizers: Iterable[Any]) -> None:
        for each in optimizers:
            if isinstance(each, Optimizer) and each not in self._watched:
                self._watched.add(each)
                each.register_step_pre_hook(self._refuse_scaled)

    def _before_backward(self) -> None:
        owner, _, optimizers, _ = self._guard
        instance = owner()
        if instance is None:
            return
        self._watch(optimizers(instance))
        if self._held and self._ours.scaled and self._replaced and not self._has_gradients():
            raise self._half("gradients were dropped")
        # Only at its end: FSDP2 keeps the gradients of all but the last micro-batch to itself.
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._held = self._has_gradients()

    def _has_gradients(self) -> bool:
        groups = (group["params"] for each in self._watched for group in each.param_groups)
        return any(one.grad is not None for group in groups for one in group if one.numel())

    def _refuse_scaled(self, optimizer: Optimizer, *_: Any) -> None:
        if self._ours.scaled and not moves_nothing(optimizer):
            raise self._half("a step came")

    @property
    def _replaced(self) -> str:
        """The name of the function that steps, if it is not the framework's own; else empty."""
        owner, step, _, package = self._guard
        name, *path = step.split(".")
        found = inspect.getattr_static(owner(), name, None)
        for attribute in path:
            found = getattr(found, attribute, found)
        own = (getattr(found, "__module__", None) or "").partition(".")[0] == package
        return "" if owner() is None or own else f"{type(owner()).__name__}.{name}"

    def _half(self, what: str) -> errors.SeamError:
        name = self._replaced
        where = (
            f"by {name}, which is not the framework's own"
            if name
            else "where the shim does not look (an adapter's one_step unscales only the gradients "
            "that it finds: see several_steps and before_clipping)"
        )
        return errors.SeamError(
            f"{self._where}: {self.subject}: {what} before the gradients were unscaled: they were "
            f"clipped or stepped {where}. Let the framework's own function clip and step, leave "
            f"the feature out with PRECISION_SHIM_FEATURES=-{FEATURE}, or train in bfloat16."
        )

    @classmethod
    def of(cls, owner: Any) -> ScaledTraining | None:
        """The ``ScaledTraining`` that ``keep`` stored on an owner, or ``None``."""
        training = getattr(owner, _ATTRIBUTE, None)
        return training if isinstance(training, cls) else None

    @classmethod
    def scaler_of(cls, owner: Any) -> Any:
        """The loss scaler of the ``ScaledTraining`` that ``of`` returns, or ``None``."""
        return getattr(cls.of(owner), "scaler", None)

    @classmethod
    def of_attribute(
        cls, owner: Any, attribute: str, framework: str, subject: str
    ) -> ScaledTraining | None:
        """The ``ScaledTraining`` of an owner whose attribute contains the framework's loss scaler.

        A scaler of the user, or one made before ``install()``, is only reported and saved; a
        disabled one counts as none.
        """
        scaler = getattr(owner, attribute, None)
        kept = cls.of(owner)
        if kept is not None and kept.scaler is scaler:
            return kept
        if not isinstance(scaler, GradScaler) or not scaler.is_enabled():
            return None
        return cls(framework, subject, scaler, drives=False)

    @staticmethod
    def current() -> ScaledTraining | None:
        """The ``ScaledTraining`` of the innermost ``in_progress``, or ``None``."""
        return _current.get()

    def in_progress(self) -> AbstractContextManager[None]:
        """Make ``current`` return this object for functions called within the context."""
        return holding(_current, self)

    def attach(self, loss: torch.Tensor) -> None:
        """Scale the gradients of a loss's backward pass; the loss's value stays unchanged."""
        if self.drives:
            self._ours.attach(loss)

    def scaled(
        self, loss_function: Callable[..., Any], *also: Callable[[torch.Tensor], None]
    ) -> Any:
        """Wrap a function that returns a loss, or a tuple that begins with one, to scale gradients.

        The functions in ``also`` are called with each loss.
        """
        return ScaledLoss(loss_function, self.attach, *also) if self.drives else loss_function

    @contextmanager
    def one_step(self, optimizer: Optimizer, inner: Sequence[Optimizer] = ()) -> Iterator[None]:
        """A context for a framework's function that clips the gradients and steps at most once.

        The gradients are unscaled before the function runs. If it takes no step because of the
        gradient norm, a skipped step is counted. ``inner`` are the optimizers in a container
        ``optimizer``.

        Raises:
            LossScaleError: too many steps in a row were skipped.
            SeamError: the function computed the gradients itself; it needs ``several_steps``.
        """
        self._skipped = False
        with self._forgets_after_errors(optimizer):
            if not self.takes_part(optimizer):
                if self.drives:
                    self._watch(inner or (optimizer,))
                with NormsInFp32():
                    yield
                return
            scaler = self._ours
            scaler.unscale_once(optimizer)
            tried = scaler.counter.steps
            with NormsInFp32(), self._stepping(optimizer, inner):
                yield
        if scaler.counter.steps == tried:
            scaler.settle(optimizer, skipped=True)
            self._skipped = True

    def takes_part(self, optimizer: Optimizer) -> bool:
        """Whether ``drives`` is true and this or another rank may have a gradient.

        Under FSDP1 a rank that owns no trainable element must join the all-reduce of overflows.
        """
        return self.drives and (self._ours.shares_overflows or bool(gradients_of(optimizer)))

    @contextmanager
    def several_steps(
        self, optimizer: Optimizer, inner: Sequence[Optimizer] = ()
    ) -> Iterator[None]:
        """A context for a framework's loop that computes losses, clips and steps several times.

        After the loop, the original ``optimizer.step`` is restored, because torch's distributed
        checkpoints step on dummy gradients. For the arguments see ``one_step``.

        Raises:
            LossScaleError: too many steps in a row were skipped.
            SeamError: a step began without a call of ``before_clipping``.
        """
        self._skipped = False
        if not self.drives:
            yield
            return
        with self._forgets_after_errors(optimizer), self._stepping(optimizer, inner):
            yield

    @contextmanager
    def _forgets_after_errors(self, optimizer: Optimizer) -> Iterator[None]:
        """After an exception in a step, let the framework continue with new gradients."""
        try:
            yield
        except BaseException:
            if isinstance(self.scaler, LossScaler):
                self.scaler.forget(optimizer)
            raise

    @contextmanager
    def _stepping(self, optimizer: Optimizer, inner: Sequence[Optimizer]) -> Iterator[None]:

        def step(*args: Any, **kwargs: Any) -> Any:
            self._refuse_scaled(optimizer)
            scaler = self._ours
            result = scaler.step(optimizer, *args, **kwargs)
            scaler.update()
            self._skipped = scaler.counter.in_row > 0
            if self._skipped:
                note_skip(optimizer, inner, *args, **kwargs)
            return result

        self._watch(inner or (optimizer,))
        self._optimizer = optimizer
        try:
            with self.in_progress(), steps_through(step, optimizer):
                yield
        finally:
            self._optimizer = None

    def before_clipping(self) -> NormsInFp32:
        """Unscale the gradients once per step; return a context in which to compute their norm."""
        if self._optimizer is not None:
            self._ours.unscale_once(self._optimizer)
        return NormsInFp32()

    @property
    def skipped(self) -> bool:
        """Whether the last ``one_step`` or the last step in ``several_steps`` was skipped."""
        if self.drives:
            return self._skipped
        return isinstance(self.scaler, LossScaler) and self.scaler.counter.in_row > 0

    def norm(self, norm: Any) -> Any:
        """Return the last step's grad norm, or NaN in the norm's shape if the step was skipped.

        Raises:
            LossScaleError: a step was taken although the norm is not finite.
        """
        if not self.skipped:
            if isinstance(self.scaler, LossScaler) and not math.isfinite(norm):
                raise errors.LossScaleError(
                    f"{self._where}: {self.subject}: the gradients are finite, but their norm is "
                    f"{float(norm)}, so that clipping set them to zero and the step learned "
                    "nothing. Keep the parameters in fp32, or train in bfloat16."
                )
            return norm
        return torch.full_like(norm, math.nan) if isinstance(norm, torch.Tensor) else math.nan

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """``loss_scale`` of the last step and, of the shim's scaler, ``skipped_steps`` of the job.

        ``skipped_steps`` counts from the job's first step, across resumes.
        """
        if not isinstance(self.scaler, LossScaler):
            return {f"{prefix}loss_scale": float(self.scaler.get_scale())}
        return {
            f"{prefix}loss_scale": self.scaler.loss_scale,
            f"{prefix}skipped_steps": float(self.scaler.counter.skipped),
        }

    def save(self, directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the scaler's state beside a framework's checkpoint; every rank must call ``save``.

        Call ``save`` after the framework wrote its own files. If the scaler's file cannot be
        written, only strict mode raises an error, since the framework's checkpoint is complete. For
        further arguments see ``scaling.save``.
        """
        try:
            scaling.save(directory, self.scaler, *args, **kwargs)
        except errors.ScalerCheckpointError as error:
            if current_settings().strict:
                raise
            warn(f"{self._where}: {error}")

    @contextmanager
    def saved_aside(self, place: str, directories: Mapping[str, str]) -> Iterator[dict[str, str]]:
        """Yield the directories to save into; then move the files, and write the scaler's state.

        Every rank calls ``saved_aside``. ``place`` is the directory of the scaler's file; for
        ``directories`` see ``SaveAside``.
        """
        with scaling.SaveAside(directories) as save:
            yield save.places
        self.save(place, prints=save.prints)

    def save_after(
        self, saved: Future[Any], place: str, save: scaling.SaveAside, group: Any
    ) -> Future[Any]:
        """Finish ``save`` with the scaler's present state when a save in the background has ended.

        Every rank calls ``save_after``. ``group`` is a process group of all ranks, for nothing else
        until the returned future, which replaces ``saved``, has ended.
        """
        record, ended = scaling.record_of(self.scaler), Future[Any]()

        def end(saved: Future[Any]) -> None:
            try:
                result = saved.result()
                save.publish(group)
                self.save(place, group, save.prints, record)
            except BaseException as error:  # ``ended`` raises the error
                ended.set_exception(error)
            else:
                ended.set_result(result)

        saved.add_done_callback(end)
        return ended

    def record(self, files: Files | None = None, save: str = "") -> dict[str, Any]:
        """The scaler's state for a framework's file; ``save`` is the name of the save.

        When pickled, the record stores a fingerprint of each of ``files``, which this rank has
        written.
        """
        record = scaling.record_of(self.scaler, save)
        return record if files is None else scaling.BoundWhenPickled(record, files)

    def record_tensor(self, save: str = "") -> torch.Tensor:
        """The scaler's record as a byte tensor of fixed size, for torch's distributed checkpoints.

        torch unpickles all that is no tensor there, and loads a tensor only into one of its size.
        """
        return scaling.to_tensor(scaling.record_of(self.scaler, save))

    def restore(self, directory: str | os.PathLike[str], files: Files | None = None) -> None:
        """Restore the scaler from the file beside a checkpoint; every rank must call ``restore``.

        If the scaler's file belongs to another save, the shim warns, and the scaler starts fresh.
        For ``files`` see ``scaling.load``.

        Raises:
            ScalerCheckpointError: on every rank, if the file is damaged or (strict) of another
                save.
        """
        where = os.path.join(os.fspath(directory), FILE_NAME)
        otherwise = "Delete the file to continue so without this error."
        self._restored(where, otherwise, lambda: scaling.load(directory, self.scaler, files))

    def restore_record(
        self, record: object, where: str, otherwise: str = "", files: Files | None = None
    ) -> None:
        """Restore the scaler from a record in a framework's file; every rank must call this method.

        Do not advise in ``otherwise`` to delete a file of the framework that contains more than the
        record. For the arguments see ``scaling.restore``.

        Raises:
            ScalerCheckpointError: the record is damaged on a rank, or differs between ranks, or,
                in strict mode, belongs to another save than the files.
        """
        self._restored(
            where, otherwise, lambda: scaling.restore(self.scaler, record, where, files, otherwise)
        )

    def _restored(
        self, where: str, otherwise: str, restore: Callable[[], tuple[str, ...] | None]
    ) -> None:
        """Restore the scaler, or let it start fresh, and report which."""
        before = self.scaler.get_scale()
        try:
            lines = restore()
            why = (
                f"no loss scaler state at {where}: the checkpoint was written without the shim, or "
                "by an older one."
            )
        except errors.ScalerOfAnotherSaveError as error:
            if current_settings().strict:
                text = f"{self._where}: {error} {otherwise}".rstrip()
                raise errors.ScalerOfAnotherSaveError(text) from None
            lines, why = None, str(error)
        if lines is None and isinstance(self.scaler, LossScaler):
            self.scaler.reset()  # the steps that the scaler may have counted
        if getattr(self.scaler, "scaled", False):  # gradients that wait for their step
            found = (one for each in self._watched for one in gradients_of(each))
            for one in {id(one): one for one in found}.values():  # containers hold others'
                one.mul_(self.scaler.get_scale() / before)
        if lines is not None:
            chosen = f"loss scale {self.scaler.get_scale():g} restored"
            because = "; ".join((f"from {where}", *lines))
            decide(self.framework, self.subject, FEATURE, chosen, because)
            return
        warn(
            f"{self._where}: {why} Training continues with a fresh scaler at "
            f"{self.scaler.get_scale():g}, so that the first steps may differ from a run that was "
            "not stopped."
        )

    @property
    def _ours(self) -> LossScaler:
        return cast("LossScaler", self.scaler)  # as ``drives`` says

    @property
    def _where(self) -> str:
        return versioned(self.framework)
