"""The shim for torchtitan; the module ``adapter`` has the table of seams."""
