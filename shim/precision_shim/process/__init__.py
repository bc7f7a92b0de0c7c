"""The shim within a process: start-up, ``install()``, settings, and Ray's workers.

``startup`` installs the shim when a framework is imported, ``standby`` knows whether the process
waits for such an import, and ``session`` implements ``install()``. ``settings`` reads the shim's
environment variables, and ``registry`` lists and loads the adapters, whose records ``framework``
defines. ``in_force`` decides whether a feature is in force. ``carriers`` passes the shim's
environment variables to Ray's processes, ``finders`` reports imports, and ``forks`` gives a forked
child new locks.
"""
