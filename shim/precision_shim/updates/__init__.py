"""The lost-update meter measures the share of an optimizer's updates that rounding loses.

``watch`` attaches meters to optimizers, ``measuring`` is the meter, and ``meters`` registers the
meters. ``rules`` computes a step without rounding, and ``sampling`` chooses the elements to
measure. ``copies`` finds how rollout engines round their copies of the weights; ``merged`` counts
lost updates of copies with merged LoRA. ``lost`` defines dataclasses for counts of lost updates.
"""
