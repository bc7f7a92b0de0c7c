"""The shim for AReaL; the module ``adapter`` has the table of seams."""
