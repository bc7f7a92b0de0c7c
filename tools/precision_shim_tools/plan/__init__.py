"""The plan: compute a job's memory per GPU and check its config, before the job runs.

An adapter's ``plan`` turns a ``command.Job`` into a ``Request``, and ``request.make`` turns that
into a ``record.JobPlan``. These modules and ``shapes``, ``counting``, ``search``, ``text`` and
``plot`` contain nothing specific to a framework, and import no torch at module level.
"""
