"""What a person runs: commands, plan, checkpoint doctor, lost-update meter, testing.

No worker imports this package, except the meter if ``PRECISION_SHIM_WATCH_UPDATES`` is set.
"""
