"""Tools for testing precision without a GPU; ``precision_shim_tools.testing`` documents them.

Importing this module imports neither torch nor Megatron; a tool is loaded on first use.
"""

from typing import Any

from precision_shim_tools import testing as _testing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from precision_shim_tools.testing import *  # noqa: F403

__all__ = list(_testing.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_testing, name)
