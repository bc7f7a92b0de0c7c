"""The audit: find out from live objects which precision is really in force.

``readers`` and ``reading`` read an optimizer and its model, ``counting`` counts their bytes,
``rules`` finds contradictions, and ``record`` has the audit's dataclasses. ``watching`` audits the
optimizers that a framework builds, ``files`` writes audits, ``ranks`` compares those of many ranks.
``sending``, ``halves`` and ``pairing`` audit the weights that rollout engines get. ``record``,
``files`` and ``ranks`` work without torch.
"""
