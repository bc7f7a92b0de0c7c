"""The shim for miles; the module ``adapter`` has the table of seams."""
