"""Parts of a proof that go wrong, each in its own way."""
