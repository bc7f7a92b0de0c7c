"""slime and miles: trainers that parse Megatron's own flags and make almost the same steps.

If their repositories can be reached, their own Megatron backends run here, each in its own
environment. Otherwise the modules of ``standing_in`` replace them: they have the same names and
make the same calls in the same order.
"""
