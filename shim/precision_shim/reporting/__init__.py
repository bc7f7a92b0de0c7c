"""The shim's reports to the user: decisions and warnings (``journal``), and ``status()``."""
