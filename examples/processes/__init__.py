"""Starts and ends the processes of the demos and the tests, without importing the shim."""
