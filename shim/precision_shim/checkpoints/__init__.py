"""The checkpoint doctor: what a checkpoint holds, and how a resume here will end.

Data goes one way: ``finding`` finds the models and their files, ``units`` reads the files'
metadata, ``reading`` sorts the tensors, ``foretelling`` asks the rules of the load seams,
``report`` shows the result. Nothing loads a pickle: ``pickles`` reads it as plain data. Only
``values``, which reads a sample of the masters and moments, imports torch.
"""
