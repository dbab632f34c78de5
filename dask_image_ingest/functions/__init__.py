"""A user's functions: what they do, and whether a worker has the same.

In: a function, or a class that is called. Out: a token that changes with its code, and with that of
whatever it uses, for one query or for good; an error where a process has another version of it.
"""

from dask_image_ingest.functions.code import code_of, refuse_other_code, token_of
from dask_image_ingest.functions.lasting import lasting_token

__all__ = ["code_of", "lasting_token", "refuse_other_code", "token_of"]
