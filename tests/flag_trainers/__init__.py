"""slime and miles: trainers that parse Megatron's own flags, and step in almost the same way.

Where their repositories can be reached, their own Megatron backends run here, in environments of
their own; elsewhere ``standing_in`` has modules of the same names that make the same calls in the
same order.
"""
