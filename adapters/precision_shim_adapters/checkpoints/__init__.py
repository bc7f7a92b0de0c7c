"""How the checkpoint doctor reads what a kind of checkpoint has of its own. Needs no torch.

Why a package beside the wings': theirs import torch, and a checkpoint is looked at where none is
installed. What a resume makes of it is each wing's (``resuming``), by the rules of its load seams.
"""
