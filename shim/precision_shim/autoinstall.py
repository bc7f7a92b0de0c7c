"""Importing this module installs the shim, where no ``.pth`` start-up file does (``python -S``).

Every version of verl imports it with ``VERL_USE_EXTERNAL_MODULES=precision_shim.autoinstall``. It
reads the shim's variables (``PRECISION_SHIM=0`` keeps the shim off; unset means on), never raises
an error, and exports ``PRECISION_SHIM`` to later processes.
"""

from .process.session import start

start(export=True)
