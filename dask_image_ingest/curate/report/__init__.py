"""Curation report: an HTML page with the distribution of each signal and examples of images.

In: a frame with columns of ``curate``. Out: one HTML file that needs nothing else.
"""

from dask_image_ingest.curate.report.report import Report, report

__all__ = ["Report", "report"]
