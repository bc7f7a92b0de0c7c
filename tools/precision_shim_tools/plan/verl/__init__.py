"""Plan verl's jobs: compose the config, and read each model's sections."""
