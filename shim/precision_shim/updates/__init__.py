"""The lost-update meter: which share of an optimizer's updates rounding takes away.

``watch`` measures at a step, ``rules`` has what an optimizer would do without rounding,
``sampling`` the elements that are looked at, ``lost`` the result, ``meters`` which model has one.
"""
