"""The cuDF backend; imported on demand, since cuDF needs a GPU machine's packages.

In and out: as the protocol ``Backend`` says, over GPU memory. Nothing outside imports cuDF or CuPy
at module level, but for ``cluster/``; ``column_types`` needs neither.
"""
