"""The shim's reports to the user: decisions and warnings (``journal``), and ``status()``.

``record`` has the data classes of ``status()``, and ``text`` formats them.
"""
