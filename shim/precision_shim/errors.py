"""The exceptions and the warning class of precision_shim.

Every message names the framework and its version, the symbol or config key, what was found, what
is allowed, and how to go on.
"""

from __future__ import annotations


class PrecisionShimError(Exception):
    """Base class of every error that this package raises on purpose."""


class SettingsError(PrecisionShimError, ValueError):
    """A setting has a value that makes no sense; names the variable, the value, what is allowed."""


class DtypeError(PrecisionShimError, ValueError):
    """A dtype name is unknown, or the dtype is not legal for the field it was given for.

    Attributes:
        key: where the config has it; empty where that is not known.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class SeamError(PrecisionShimError):
    """A seam cannot be patched as it was asked to be (strict mode, or a broken adapter)."""


class SourceError(PrecisionShimError, ValueError):
    """A path that was to be looked into holds no framework, or cannot be read."""


class InconsistentPrecisionError(PrecisionShimError, ValueError):
    """Optimizer config, live parameters and gradient buckets contradict each other."""


class UnsupportedPrecisionError(PrecisionShimError, RuntimeError):
    """A user asked for a precision that the installed libraries cannot run."""


class CheckpointLayoutError(PrecisionShimError, RuntimeError):
    """A checkpoint's optimizer states cannot be continued exactly by the live optimizer."""


class CheckpointUnreadableError(PrecisionShimError, ValueError):
    """A path holds no checkpoint, or one that is damaged; says so, and how to go on."""


class LossScaleError(PrecisionShimError, RuntimeError):
    """Gradients stayed non-finite over many steps in a row, whatever the loss scale."""


class ScalerCheckpointError(PrecisionShimError, RuntimeError):
    """A saved scaler state is damaged, of a newer format, or could not be written or read."""


class ScalerOfAnotherSaveError(ScalerCheckpointError):
    """A saved scaler state lies beside files that another save has written."""


class AuditError(PrecisionShimError, ValueError):
    """``audit()`` was given what it cannot read, or a component that there is not."""


class PlanError(PrecisionShimError, ValueError):
    """A command, a config or a model cannot be read, so that nothing can be planned."""


class PrecisionShimWarning(UserWarning):
    """Category of every warning that this package emits, so that users can filter it as one."""
