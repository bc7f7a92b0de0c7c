"""``install()`` patches RL post-training frameworks to use the precision that users configure.

Importing this package imports no torch, wrapt or framework: a start-up file may import it in every
Python process of a cluster. Each name in ``__all__`` is loaded on first use.
"""

from ._lazy import lazily

_NAMES = {
    "._about": "__version__",
    ".process.session": "install uninstall status",
    ".auditing.audits": "audit",
    ".auditing.updates": "watch_updates UpdateWatch",
    ".auditing.record": "Audit",
    ".reporting.status": "Status",
    ".errors": "PrecisionShimError SettingsError DtypeError SeamError SourceError "
    "PartialInstallationError InconsistentPrecisionError UnsupportedPrecisionError "
    "CheckpointLayoutError CheckpointUnreadableError LossScaleError ScalerCheckpointError "
    "ScalerOfAnotherSaveError AuditError PlanError PrecisionShimWarning",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_WHERE)

TYPE_CHECKING = False  # replaces typing.TYPE_CHECKING: importing typing would take 2 ms
if TYPE_CHECKING:
    from ._about import __version__ as __version__
    from .auditing.audits import audit as audit
    from .auditing.record import Audit as Audit
    from .auditing.updates import UpdateWatch as UpdateWatch
    from .auditing.updates import watch_updates as watch_updates
    from .errors import *  # noqa: F403
    from .process.session import install as install
    from .process.session import status as status
    from .process.session import uninstall as uninstall
    from .reporting.status import Status as Status

__getattr__, __dir__ = lazily(__name__, _WHERE)
