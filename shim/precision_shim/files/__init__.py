"""Read the files of checkpoints and models as plain data, without torch or the files' code."""
