"""``ImageDataFrame``: a Dask dataframe with type hints.

At run time it is Dask's own class. Type checkers read ``image_frame.pyi``, which declares
``.images`` and the results of operations, for which Dask has no type hints.
"""

import dask.dataframe as dd

ImageDataFrame = dd.DataFrame
