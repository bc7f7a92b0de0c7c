"""The checkpoint doctor: show a checkpoint's content, and predict the result of a resume.

``finding`` finds the models and their files, ``units`` reads the files' metadata, and ``reading``
assigns the tensors to components such as masters. ``checking`` compares checksums, and ``report``
shows the result. ``foretelling`` predicts the resume by the rules that the shim applies when a job
loads a checkpoint. No module unpickles a file: ``pickles`` reads pickles as plain data. ``values``
reads a sample of masters and moments, and is the only module that imports torch.
"""
