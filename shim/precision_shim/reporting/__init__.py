"""What the shim reports to the user: decisions and warnings (``journal``) and ``status()``.

``record`` holds the data of ``status()``, and ``text`` formats it.
"""
