"""The exceptions and the warning class of precision_shim.

Messages name framework, version, symbol or key, the value, the allowed values and the remedy.
"""

from __future__ import annotations


class PrecisionShimError(Exception):
    """Base class of every error that this package raises on purpose."""


class SettingsError(PrecisionShimError, ValueError):
    """A setting has an invalid value; the message names the setting and the allowed values."""


class DtypeError(PrecisionShimError, ValueError):
    """A dtype name is unknown, or the dtype is not allowed in its config field.

    Attributes:
        key: the dtype's config key; empty if the key is not known.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class SeamError(PrecisionShimError):
    """A seam cannot be patched (an error only in strict mode), or an adapter is broken."""


class SourceError(PrecisionShimError, ValueError):
    """A path that the user gave contains no framework's source, or cannot be read."""


class PartialInstallationError(PrecisionShimError, RuntimeError):
    """Some processes of a job have no shim, or another version or settings than this process."""


class InconsistentPrecisionError(PrecisionShimError, ValueError):
    """Optimizer config, live parameters and gradient buckets contradict each other."""


class UnsupportedPrecisionError(PrecisionShimError, RuntimeError):
    """A user asked for a precision that the installed libraries cannot run."""


class CheckpointLayoutError(PrecisionShimError, RuntimeError):
    """The live optimizer cannot continue exactly from a checkpoint's optimizer states."""


class CheckpointUnreadableError(PrecisionShimError, ValueError):
    """A path contains no checkpoint, or a damaged checkpoint; the message names the remedy."""


class LossScaleError(PrecisionShimError, RuntimeError):
    """Gradients were not finite in many consecutive steps, although the loss scale was lowered."""


class ScalerCheckpointError(PrecisionShimError, RuntimeError):
    """A scaler state's file is damaged, has a newer format, or could not be written or read."""


class ScalerOfAnotherSaveError(ScalerCheckpointError):
    """A saved scaler state and the files in the same directory were written by different saves."""


class AuditError(PrecisionShimError, ValueError):
    """``audit()`` was given an object that it cannot read, or an unknown component."""


class PlanError(PrecisionShimError, ValueError):
    """``precision-shim plan`` cannot read a command, a config or a model."""


class PrecisionShimWarning(UserWarning):
    """Category of every warning that this package emits; one filter covers them all."""
