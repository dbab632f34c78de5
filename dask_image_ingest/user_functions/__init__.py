"""Tokens of the user's own functions.

In: a function, or a class that is called. Out: a token that changes with its code, and with that of
whatever it uses; an error where a process has another version of it.
"""

from dask_image_ingest.user_functions.stable_token import (
    code_digests,
    refuse_other_code,
    stable_token,
    token_of,
)

__all__ = ["code_digests", "refuse_other_code", "stable_token", "token_of"]
