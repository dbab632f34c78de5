"""One shard's bytes → its samples, and what is wrong with it."""

from dataclasses import dataclass, field, replace

from dask_image_ingest.storage import ByteReader, LazyBytes, as_reader
from dask_image_ingest.tar.garbage_collection import gc_paused
from dask_image_ingest.tar.grouping import Sample, group
from dask_image_ingest.tar.header import SparseMap
from dask_image_ingest.tar.members import Damage, Walk

__all__ = ["TarIndex", "index_tar"]


@dataclass(slots=True)
class TarIndex:
    """The samples of a shard.

    Attributes
    ----------
    samples
        In the order of their first members.
    sparse
        Where a sparse member's bytes begin → its stored pieces. Its span has the expanded size.
    damage
        None for a complete shard; every whole member before the damage is in ``samples``.
    interleaved
        Keys that came back after another key, and were joined to their earlier members.
    repeated
        Keys that came back with a member that they had already: each time, a sample of its own.
    members
        How many regular files there are, those included that belong to no sample.
    pax
        How many members have a PAX header of their own.
    """

    samples: list[Sample] = field(default_factory=list)
    sparse: dict[int, SparseMap] = field(default_factory=dict)
    damage: Damage | None = None
    interleaved: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    members: int = 0
    pax: int = 0


def index_tar(content: LazyBytes, url: str = "the shard") -> TarIndex:
    r"""Find the samples of a shard by reading its tar headers.

    Samples are grouped by webdataset's rule: the key is the path up to the first dot of its last
    part, what follows in lower case is the extension, only regular files count, and names such as
    ``__meta__`` are skipped. One difference is on purpose: a key that comes back later in the shard
    is joined to its sample, where webdataset makes a second sample of it. Only if it comes back
    with an extension that the sample has already does it begin a second sample here too.

    Like :mod:`tarfile` and webdataset, the walk ends at the first block of zeros. What follows it,
    perhaps another tar, is not read but reported as damage.

    Parameters
    ----------
    content
        The bytes of the shard, decompressed. Only headers are read, and what follows the last one.
    url
        What errors call the shard.

    Returns
    -------
    TarIndex
        Keys are valid UTF-8, as Arrow demands: a byte of a name that is not becomes ``\xNN``.

    Raises
    ------
    ShardError
        If the shard does not begin with a tar header. All else that is wrong is
        ``TarIndex.damage``.
    """
    reader = as_reader(content)
    reader.prefetch_scan()
    walk = Walk(reader, url)
    with gc_paused():
        grouped = group(walk)
    return TarIndex(
        grouped.samples,
        sparse=walk.sparse,
        damage=_with_stream_damage(walk.damage, reader),
        interleaved=grouped.interleaved,
        repeated=grouped.repeated,
        members=grouped.members,
        pax=walk.pax,
    )


def _with_stream_damage(damage: Damage | None, reader: ByteReader) -> Damage | None:
    """The damage of a tar, and that of the compressed stream it came from."""
    if reader.damage is None:
        return damage
    if damage is None:
        return Damage(len(reader), reader.damage, "truncated-stream")
    return replace(damage, reason=f"{damage.reason}; {reader.damage}")
