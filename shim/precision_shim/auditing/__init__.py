"""The audit: what precision is really in force, read from live objects.

``record`` is what an audit says, ``reading`` what is read of an optimizer and a model, ``counting``
its bytes, ``rules`` what contradicts what, ``watching`` the audit by itself, ``files`` and
``ranks`` what becomes of the audits of many ranks. ``updates`` is the meter of lost updates,
``meters`` who has one, ``update_rules`` what optimizers would do without rounding, ``sampling``
which elements are looked at, ``lost`` what was found. ``record``, ``lost``, ``files`` and ``ranks``
work without torch.
"""
