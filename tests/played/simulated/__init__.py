"""A GPU that is not there: cuDF's own Python over host memory.

The wheels' cuDF, dask-cudf and pylibcudf run as they are. In place of libcudf's kernels stands
Arrow (`kernels`, over the columns of `columns`), in place of CuPy NumPy (`arrays`), in place of
DALI's operators for a GPU those for a CPU (`decoder`). All memory of the device is counted
(`memory`). To be loaded by ``pytest -p simulated.plugin``, before cuDF and CuPy.
"""
