"""The audit: what precision is really in force, read from live objects.

``reading`` reads an optimizer and its model, ``counting`` counts their bytes, ``rules`` finds
contradictions, ``record`` has the audit's dataclasses, ``watching`` audits the optimizers that a
framework builds, ``files`` writes audits, ``ranks`` compares those of many ranks. ``record``,
``files`` and ``ranks`` work without torch.
"""
