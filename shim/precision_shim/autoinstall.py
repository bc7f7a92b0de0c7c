"""Importing this module installs the shim; meant for processes that read no ``.pth`` file.

Under ``python -S``, and in images without ``.pth`` files, nothing reads ``PRECISION_SHIM`` when a
process starts. There a framework's own plug-in mechanism can import this module. All versions of
verl have such a mechanism::

    VERL_USE_EXTERNAL_MODULES=precision_shim.autoinstall

The import does what the automatic start does: it reads ``PRECISION_SHIM`` (``0`` keeps the shim
off) and the other variables, and never raises. ``PRECISION_SHIM`` need not be set, because the
import itself switches the shim on. This module exports the variable to processes started later.
"""

from .process.session import start

start(export=True)
