"""A user's functions: what they do, and whether a worker has the same.

In: a function, or a class that is called. Out: a token that changes with its code, and with that of
whatever it uses; an error where a process has another version of it.
"""

from dask_image_ingest.functions.code import code_of, refuse_other_code, token_of

__all__ = ["code_of", "refuse_other_code", "token_of"]
