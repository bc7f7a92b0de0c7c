"""What the user is told: decisions and warnings (``journal``) and ``status()``.

``record`` holds what ``status()`` says and ``text`` writes it out.
"""
