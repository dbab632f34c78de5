"""The scan node, and the optimiser's knowledge of Dask's operations above it.

In: a query. Out: a scan with columns, filters and limits; lineage and alignment of partitions.
"""
