"""The shim within a process: start-up, ``install()``, settings, and Ray's workers.

``startup`` installs the shim when a framework is imported, ``standby`` knows whether the process
waits for that, ``session`` implements ``install()``, and ``registry`` lists the adapters, whose
records ``framework`` defines.
"""
