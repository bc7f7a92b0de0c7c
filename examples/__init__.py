"""One example per framework; see README.md here."""
