"""The lost-update meter measures the share of an optimizer's updates that rounding loses.

``watch`` attaches meters to optimizers, ``measuring`` is the meter, and ``meters`` registers the
meters. ``rules`` computes a step without rounding, and ``sampling`` chooses the elements to
measure. ``copies`` and ``merged`` describe rollout engines' weights. ``lost`` has the figures.
"""
