"""The shim for verl; the module ``adapter`` has the table of seams."""
