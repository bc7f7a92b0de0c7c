"""Importing this module installs the shim, for processes that read no start-up file.

``python -S`` and images that strip ``.pth`` files never see the variable. There a framework's own
plug-in mechanism can import this module, such as verl's, in all its versions::

    VERL_USE_EXTERNAL_MODULES=precision_shim.autoinstall

It is the automatic start and as careful as that: ``PRECISION_SHIM`` and the other variables are
read as everywhere (``0`` keeps it off), and it never raises. As the import is the opt-in here,
``PRECISION_SHIM`` need not be set; it is exported to processes started later.
"""

from .process.session import start

start(export=True)
