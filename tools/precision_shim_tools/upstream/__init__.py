"""Find the changes in a framework's release, by reading its source.

``trees`` finds a release in a wheel or a folder. ``symbols`` has the record of the symbols that
seams rely on; ``digest`` and ``changes`` compare the code of these symbols. ``framework_status``
predicts the shim's effect on a release.
"""
