"""Late materialization: rows are moved with references to their images, and decoded afterwards.

In: frames with references, or with columns that locate or hold encoded images. Out: the same rows
with pixels and errors, and the optimiser rules that place the decode after shuffles and the like.
"""
