"""Tests of what the shim assumes of Megatron, torch and the frameworks; the shim is off.

A comparison of names finds a removed symbol, but not a removed assertion whose identifiers are
still elsewhere in the source. Each test runs the installed code and checks one fact that the shim
relies on, which the test's docstring names.
"""
