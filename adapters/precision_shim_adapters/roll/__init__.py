"""The shim for ROLL; the module ``adapter`` has the table of seams."""
