"""The adapters: one module or small package per framework, and what several of them share.

An adapter is a table of seams (``ADAPTER``) plus thin translations between the framework's shapes
and the rules'. It holds no rule.
"""
