"""What Megatron and TransformerEngine allow and what a model's optimizer gets of it: pure.

``wishes`` is what the user wrote, ``legality`` what this TransformerEngine takes, ``table`` the
choice for a model's dtype, ``bucket`` the gradient bucket's, ``scaler`` the loss scaler's settings.
"""
