"""What a release of a framework has changed, read from its source or tested by running it.

``trees`` finds a release in a wheel or a folder. ``symbols`` has the record of the symbols that
seams rely on; ``digest`` and ``changes`` compare the code of these symbols. ``foresight`` predicts
what the shim would do to that release, and ``probes`` test whether the framework behaves as the
rules assume.
"""
