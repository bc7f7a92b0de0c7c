"""The checkpoint doctor: show a checkpoint's content, and predict the result of a resume.

``finding`` finds the models and their files, ``units`` reads the files' metadata, and ``reading``
assigns the tensors to components such as masters and checks the scaler's record. ``prediction``
predicts the resume by the rules that the shim applies when a job loads a checkpoint, and ``report``
shows the result. No module unpickles a file. Only ``values`` and the predictions import torch.
"""
