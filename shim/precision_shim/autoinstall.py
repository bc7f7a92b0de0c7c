"""Importing this module installs the shim, for processes that read no start-up file.

Under ``python -S``, and in images that strip ``.pth`` files, no process reads the variable at its
start. There a framework's own plug-in mechanism can import this module. All versions of verl have
such a mechanism::

    VERL_USE_EXTERNAL_MODULES=precision_shim.autoinstall

The import does what the automatic start does: it reads ``PRECISION_SHIM`` (``0`` keeps the shim
off) and the other variables, and never raises. The import is the opt-in, so ``PRECISION_SHIM`` need
not be set; this module exports it to processes started later.
"""

from .process.session import start

start(export=True)
