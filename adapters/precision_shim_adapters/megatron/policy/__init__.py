"""Pure functions that choose the settings of a model's optimizer, bucket and loss scaler.

``requested``: the settings that the user wrote. ``legality``: the dtypes that the installed
TransformerEngine accepts. ``optimizer_plan``: fields of Megatron's OptimizerConfig for a model's
dtype. ``bucket``: the gradient bucket's dtype. ``scaler``: the loss scaler's settings.
"""
