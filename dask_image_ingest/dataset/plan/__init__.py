"""The lazy scan, and what the optimiser knows of Dask's operations above it.

In: a query. Out: columns, filters and limits in the scan; lineage and alignment of partitions.
"""
