"""The cuDF backend, imported on demand, as cuDF may not be installed.

In and out: as in the protocol ``Backend``, in GPU memory. No other subpackage imports cuDF or CuPy
at module level.
"""
