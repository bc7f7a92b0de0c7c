"""Pure functions that choose the settings of a model's optimizer, bucket and loss scaler."""
