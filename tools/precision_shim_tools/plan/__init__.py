"""The plan: compute a job's memory per GPU and check its config, before the job runs.

``command`` reads a job's launch command, and ``shapes`` reads the shapes of a model's parameters.
``counting`` counts bytes, and ``record`` defines the plan's dataclasses. ``search`` finds the
settings with which the job fits, and ``text`` and ``plot`` show a plan. These modules contain
nothing specific to a framework, and import no torch at module level. An adapter's ``plan`` turns a
``Job`` into a ``Request``, and ``request.make`` turns the ``Request`` into a ``JobPlan``.
``rollout`` predicts the driver's report on trainer and rollout.
"""
