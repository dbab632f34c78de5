"""``ImageDataFrame``: a Dask dataframe, with types for the checkers of a user's code.

At run time it is Dask's own class. Type checkers read ``image_frame.pyi`` instead: they don't see
accessors such as ``.images``, and Dask does not tell them what its operations give.
"""

import dask.dataframe as dd

ImageDataFrame = dd.DataFrame
