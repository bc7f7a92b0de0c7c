"""Pure functions that choose the settings of a model's optimizer, bucket and loss scaler.

``wishes``: what the user wrote. ``legality``: the dtypes that the installed TransformerEngine
takes. ``table``: the optimizer's fields for a model's dtype. ``bucket``: the gradient bucket's
dtype. ``scaler``: the loss scaler's settings.
"""
