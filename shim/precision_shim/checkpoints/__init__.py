"""The checkpoint doctor: what a checkpoint holds, and what a resume here will make of it.

Data goes one way: ``finding`` tells models and files apart, ``units`` reads the files' metadata and
``reading`` sorts the tensors, ``foretelling`` asks the rules of the load seams, ``report`` shows
it. No pickle is loaded: ``pickles`` reads what one describes as plain data. Nothing here imports
torch but ``values``, which looks at a sample of the masters and moments.
"""
