"""Importing this module installs the shim, for processes that skip the ``.pth`` start-up file.

Under ``python -S``, and in images without the start-up file ``zz_precision_shim.pth``, nothing
reads ``PRECISION_SHIM`` when a process starts. A framework's own plug-in mechanism can import this
module. Every version of verl imports the modules in ``VERL_USE_EXTERNAL_MODULES``::

    VERL_USE_EXTERNAL_MODULES=precision_shim.autoinstall

Like the start-up file, the import reads ``PRECISION_SHIM`` (``0`` keeps the shim off) and the
shim's other variables, and never raises an error. ``PRECISION_SHIM`` need not be set, because the
import itself switches the shim on. The import also exports ``PRECISION_SHIM`` to later processes.
"""

from .process.session import start

start(export=True)
