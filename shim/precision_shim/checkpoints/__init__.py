"""The checkpoint doctor: show what a checkpoint contains, and predict how a resume here will end.

Data goes one way: ``finding`` finds the models and their files, ``units`` reads the files'
metadata, ``reading`` sorts the tensors, ``checking`` compares checksums, ``foretelling`` predicts
the resume by the rules of the load seams, and ``report`` shows the result. Nothing unpickles a
file: ``pickles`` reads pickles as plain data. Only ``values``, which reads a sample of the masters
and moments, imports torch.
"""
