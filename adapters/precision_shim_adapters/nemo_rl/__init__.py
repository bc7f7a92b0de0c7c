"""The shim for NeMo-RL; the module ``adapter`` has the table of seams."""
