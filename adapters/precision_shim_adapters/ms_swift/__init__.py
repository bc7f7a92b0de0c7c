"""The shim for ms-swift; the module ``adapter`` has the table of seams."""
