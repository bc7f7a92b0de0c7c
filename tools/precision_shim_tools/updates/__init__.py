"""The lost-update meter measures the share of an optimizer's updates that rounding loses.

``watch`` attaches meters to optimizers, and ``measuring`` is the meter. ``rules`` computes a step
without rounding, ``sampling`` chooses the elements to measure, and ``copies`` finds the dtypes of
the rollout engines' copies. ``lost`` defines dataclasses for counts of lost updates.
"""
