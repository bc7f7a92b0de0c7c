"""The lost-update meter: which share of an optimizer's updates is lost to rounding.

``watch`` attaches meters to optimizers, ``measuring`` is the meter, ``rules`` computes a step
without rounding, ``sampling`` chooses the elements to measure, ``copies`` and ``merged`` describe
what rollout engines get, ``lost`` has the figures, ``meters`` the meter of each optimizer.
"""
