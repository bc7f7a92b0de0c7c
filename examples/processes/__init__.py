"""Starts and ends the processes of the demos and the tests; imports nothing of the shim."""
