"""Curation report: an HTML page with the distribution of each signal and examples of images.

In: a frame with columns of ``curate``. Out: one HTML file that needs nothing else.
"""

from dask_image_ingest.curate.report.write_report import Report, write_report

__all__ = ["Report", "write_report"]
