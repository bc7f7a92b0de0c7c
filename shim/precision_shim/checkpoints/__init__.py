"""The checkpoint doctor: show a checkpoint's content, and predict the result of a resume.

``finding`` finds the models and their files, ``units`` reads the files' metadata, and ``reading``
sorts the tensors. ``checking`` compares checksums, ``foretelling`` predicts the resume by the
rules of the load seams, and ``report`` shows the result. No module unpickles a file: ``pickles``
reads pickles as plain data. ``values`` reads a sample of masters and moments, and is the only
module that imports torch.
"""
