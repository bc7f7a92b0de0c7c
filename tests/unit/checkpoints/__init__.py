"""Tests of the checkpoint doctor's readers, on files that torch itself wrote."""
