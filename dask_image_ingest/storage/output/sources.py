"""A file that is read is neither written nor removed."""

from __future__ import annotations

from collections.abc import Iterable

from dask_image_ingest.errors import DaskImageIngestError, ExportError
from dask_image_ingest.storage.shard import identities


def refuse_sources(
    sources: Iterable[str],
    written: Iterable[str] = (),
    writer: str = "call",
    *,
    reader: str = "the frame",
    folder: str | None = None,
    advice: str = ". Choose another folder",
    error: type[DaskImageIngestError] = ExportError,
) -> None:
    """Refuse to write or remove files that are read, by whatever name.

    Parameters
    ----------
    sources
        URLs of what is read.
    written
        URLs of what would be written or removed.
    writer
        What would do so, for the message: ``"export"``.
    reader
        What reads the sources, for the message.
    folder
        A folder of which a later read takes whatever is there: no source may lie in it.
    advice, error
        The end of the message, and its class.
    """
    folders: dict[str, str] = {}
    targets = set().union(*(identities(url, folders) for url in written))
    whole = [] if folder is None else [(*i[:2], f"{i[2].rstrip('/')}/") for i in identities(folder)]
    for source in sorted(sources):
        for kind, host, path in identities(source, folders):
            if (kind, host, path) in targets:
                why = f"which this {writer} would write or remove"
            elif any((kind, host) == (k, h) and path.startswith(top) for k, h, top in whole):
                why = f"which lies in {folder}, where this {writer} writes files of its own"
            else:
                continue
            raise error(f"{reader} reads {source}, {why}{advice}")
