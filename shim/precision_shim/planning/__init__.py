"""The plan: compute a job's memory per GPU and check its config, before the job runs.

``command`` reads a job's launch command, ``shapes`` a model's names and shapes; ``counting`` counts
the bytes of parameters of known dtypes, ``record`` has the plan's dataclasses, ``search`` finds the
settings with which the job fits, ``text`` and ``plot`` show a plan. None of them contains anything
specific to a framework or imports torch at module level. An adapter's ``plan`` turns a ``Job`` into
a ``Request``, and ``request.make`` turns that into a ``Plan``.
"""
