"""What a release of a framework has changed, read from its source or asked of it.

``trees`` finds a release in a wheel, a folder or what is installed; ``symbols`` holds what was
recorded of the symbols that seams rely on, ``digest`` and ``changes`` compare their code.
``foresight`` tells what the seams would do there, and ``probes`` ask whether what the rules assume
of a framework still holds.
"""
