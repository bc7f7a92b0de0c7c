"""The checkpoint doctor: show a checkpoint's content, and predict the result of a resume.

``finding`` finds the files, ``units`` reads their metadata, ``reading`` sorts tensors, and
``prediction`` applies the rules by which the shim loads. No module unpickles a file. Only
``values`` and the predictions import torch.
"""
