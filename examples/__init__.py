"""One example per framework; see README.md in this folder."""
