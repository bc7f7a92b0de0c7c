"""The audit: what it reads of live objects, and what contradicts what."""
