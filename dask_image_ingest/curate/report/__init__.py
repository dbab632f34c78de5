"""A page that shows what curation has found."""

from dask_image_ingest.curate.report.report import Report, report

__all__ = ["Report", "report"]
