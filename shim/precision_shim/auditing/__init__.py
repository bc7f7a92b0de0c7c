"""The audit: read from a live model and optimizer which dtypes are really in use.

``readers`` and ``reading`` read them, ``counting`` counts bytes, ``rules`` compares with the
config, ``automatic`` audits what a framework builds, and ``weight_audit`` the weights sent to
rollouts. ``record``, ``files``, ``ranks`` and ``sent_weights`` work without torch.
"""
