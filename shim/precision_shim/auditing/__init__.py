"""The audit: read from a live model and optimizer which dtypes are really in use.

``readers`` and ``reading`` read a model and its optimizer, and ``counting`` counts the bytes of
both. ``rules`` compares dtypes with the config, and ``record`` defines the audit's dataclasses.
``automatic`` audits the optimizers that a framework builds, ``files`` writes audits to files, and
``ranks`` compares the audits of many ranks. ``weight_audit`` and ``sent_weights`` audit the weights
sent to rollout engines. ``record``, ``files``, ``ranks`` and ``sent_weights`` work without torch.
"""
