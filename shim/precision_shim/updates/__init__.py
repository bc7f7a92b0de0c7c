"""The lost-update meter: which share of an optimizer's updates is lost to rounding.

``watch`` measures at a step, ``rules`` computes an optimizer's step without rounding, ``sampling``
chooses the elements to measure, ``lost`` has the figures, ``meters`` the meter of each optimizer.
"""
