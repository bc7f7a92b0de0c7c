"""The plan: what a job's config costs per GPU and whether it is legal, before it runs.

``record`` is what a plan says, ``counting`` the bytes of parameters of known dtypes, ``shapes`` a
model's names and shapes, ``command`` a job's launch line, ``search`` the cheapest change under
which it fits, ``text`` and ``plot`` how it is shown. None of them knows a framework or imports
torch at its top; an adapter's function ``plan`` goes from a command to a ``Plan``.
"""
