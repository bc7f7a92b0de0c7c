"""The adapters: one module or small package per framework, and what several of them share.

``frameworks`` declares each framework. An adapter is a table of seams (``SEAMS``) and functions
that translate between the framework's configs and the rules' records. It holds no rule itself.
"""
