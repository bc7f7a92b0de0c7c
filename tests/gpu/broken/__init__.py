"""Parts of a GPU proof that fail, each in its own way."""
