"""Tests of the audit: how it reads live objects, and what counts as a contradiction."""
