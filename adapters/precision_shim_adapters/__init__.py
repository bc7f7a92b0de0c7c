"""The adapters: one module or small package per framework, and what several of them share.

``frameworks`` declares each framework; an adapter is a table of seams (``SEAMS``) plus thin
translations between the framework's shapes and the rules'. It holds no rule.
"""
