"""The shim for SkyRL; the module ``adapter`` has the table of seams."""
