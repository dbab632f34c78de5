"""Tokens of the user's functions.

In: a function, or another callable. Out: a token that changes with its code and with the code that
it uses; an error in a process that has another version of that code.
"""

from dask_image_ingest.user_functions.stable_token import (
    code_digests,
    refuse_other_code,
    stable_token,
    token_of,
)

__all__ = ["code_digests", "refuse_other_code", "stable_token", "token_of"]
