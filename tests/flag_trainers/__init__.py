"""slime and miles: trainers that parse Megatron's own flags and make almost the same steps.

If their repositories can be reached, their own Megatron backends run here, each in its own
environment. If the repositories cannot be reached, the modules of ``standing_in`` replace the
backends: they have the same names and calls, in the same order.
"""
