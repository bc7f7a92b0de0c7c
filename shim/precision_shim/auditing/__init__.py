"""The audit: what precision is really in force, read from live objects.

``record`` is what an audit says, ``reading`` what is read of an optimizer and a model, ``counting``
its bytes, ``rules`` what contradicts what, ``watching`` the audit by itself, ``files`` and
``ranks`` what becomes of the audits of many ranks. ``record``, ``files`` and ``ranks`` work
without torch.
"""
