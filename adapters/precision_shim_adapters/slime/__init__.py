"""The shim for slime; the module ``adapter`` has the table of seams."""
