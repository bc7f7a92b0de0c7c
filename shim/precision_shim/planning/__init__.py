"""The plan: what a job's config costs per GPU and whether it is legal, before it runs.

``command`` reads a job's launch line, ``shapes`` a model's names and shapes; ``counting`` counts
the bytes of parameters of known dtypes, ``record`` has the plan's dataclasses, ``search`` finds the
cheapest settings with which the job fits, ``text`` and ``plot`` show a plan. None of them knows a
framework or imports torch at module level; an adapter's ``plan`` turns a ``Job`` into a
``Request``, and ``request.make`` turns that into a ``Plan``.
"""
