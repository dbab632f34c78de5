"""A shard as a listing tells of it."""

from dataclasses import dataclass

from dask_image_ingest.errors import ShardError
from dask_image_ingest.passwords import UrlHolder
from dask_image_ingest.storage.lazy_bytes import LazyBytes

__all__ = ["Shard", "as_listed", "changed", "modified"]


@dataclass(frozen=True, slots=True, repr=False)
class Shard(UrlHolder):
    """A shard as it was when it was found.

    Attributes
    ----------
    url
        An absolute path for a local shard, else the whole URL.
    size
        In bytes, as stored; -1 if the server does not tell.
    version
        What changes when the shard does: the time of its last change in nanoseconds, or what its
        file system knows of that kind (an ETag, a time). Empty if it knows nothing.
    sidecar
        The file beside it that has columns for its samples, where these were asked for.
    """

    url: str
    size: int
    version: str
    sidecar: "Shard | None" = None

    @property
    def sidecar_url(self) -> str | None:
        """Where the file beside it is."""
        return None if self.sidecar is None else self.sidecar.url


def as_listed(url: str, content: LazyBytes) -> Shard | None:
    """Which version of a shard is open, as a listing would tell it.

    None where that holds for this process alone, or is not known: of copies that are kept, and of
    what is decompressed or written by a command.
    """
    listed: Shard | None = getattr(content, "listed", None)
    return listed if listed is not None and listed.url == url else None


def modified(content: LazyBytes) -> float | None:
    """When what is open was changed, in seconds; None where its server does not tell."""
    found: float | None = getattr(content, "modified", None)
    return found


def changed(url: str) -> ShardError:
    """What is raised for a shard that is another one than was listed."""
    return ShardError(
        f"{url} has changed since it was listed, and what is known of it is known of another "
        "version. Read it again"
    )
