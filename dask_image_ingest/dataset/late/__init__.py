"""Late decode: rows with image references, moved about as metadata, become pixels at the end.

In: frames with references, or with columns that point to encoded images. Out: the same rows with
pixels and errors, and the rules by which dask's optimiser puts the decode above what moves rows.
"""
