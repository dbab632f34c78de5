"""``mix_batches``: batches with rows of several frames, sampled by weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dask_image_ingest.arguments import shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.batch_format import Format
from dask_image_ingest.loader.iter_batches import Batches, Schedule
from dask_image_ingest.loader.position import parse_shard
from dask_image_ingest.typedefs import PerChannel


def mix_batches(
    frames: Sequence[Any],
    batch_size: int,
    weights: Sequence[float] | None = None,
    *,
    longest: bool = False,
    format: Format = "numpy",
    columns: Sequence[str] | None = None,
    shuffle: int | None = None,
    epoch: int | None = None,
    drop_last: bool = False,
    prefetch: int | None = None,
    start: int | Sequence[Any] = 0,
    shard: tuple[int, int] | Literal["auto"] | None = "auto",
    normalize: tuple[PerChannel, PerChannel] | None = None,
    channels_first: bool | None = None,
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
) -> Batches:
    """Stream batches of rows from several frames, sampled by weights.

    Parameters
    ----------
    frames
        Dask, pandas or cuDF dataframes with images, all with the ``columns`` of the batches.
    batch_size
        Images in a batch.
    weights
        Relative probability that a row comes from each frame: numbers above 0, which need not add
        up to 1. By default all are equal.
    longest
        Whether to continue with the other frames when one has no rows left, until each row of all
        frames has come once. By default the stream ends with the first frame that ends.
    format, columns
        As for :meth:`~pandas.DataFrame.images.iter_batches`, for each of the frames.
    shuffle, epoch
        As there. They also determine how many rows of a batch come from each frame.
    drop_last, prefetch, start, shard, normalize, channels_first, collate_fn
        As there.

    Returns
    -------
    Batches
        An iterator of batches as from ``iter_batches``, with ``len`` and ``position``. The rows of
        a batch are grouped by frame, in the order of ``frames``. If the frames' images differ in
        shape, they are lists of arrays. With ``format="torch"`` it is a torch ``IterableDataset``
        too, for ``DataLoader(batches, batch_size=None, num_workers=2)``, with ``set_epoch`` and
        ``position_after`` as the dataset of ``dataloader`` has them.

    Raises
    ------
    ArgumentError
        For an empty list of frames, invalid weights, and frames whose batches have different
        columns.

    Notes
    -----
    The numbers of rows in a batch are drawn from a multinomial distribution, as if the frame of
    each row was drawn independently. Each frame keeps its own partitions in memory.

    Examples
    --------
    >>> wide, tall = ddf[ddf.width > ddf.height], ddf[ddf.width <= ddf.height]
    >>> batch = next(mix_batches([wide, tall], 8, weights=[3, 1], columns=["cls"]))
    >>> batch["image"].shape, batch["cls"].shape
    ((8, 224, 224, 3), (8,))
    """
    if not frames:
        raise ArgumentError("frames=[]: pass at least one dataframe with images")
    frame_weights = _normalize_weights(weights, len(frames))
    make = functools.partial(
        _mixed,
        list(frames),
        columns,
        Schedule(shuffle, frame_weights=frame_weights, longest=longest),
        batch_size=batch_size,
        format=format,
        drop_last=drop_last,
        prefetch=prefetch,
        normalize=normalize,
        channels_first=channels_first,
        collate_fn=collate_fn,
    )
    if format != "torch":
        return make(epoch=epoch, start=start, share=parse_shard(shard, format))
    from dask_image_ingest.loader.dataloader import make_dataset

    dataset = make_dataset(make, start, shard, goes_on=True)
    if epoch is not None:
        dataset.set_epoch(epoch)
    return dataset


def _mixed(
    frames: list[Any],
    columns: Sequence[str] | None,
    schedule: Schedule,
    *,
    epoch: int | None,
    **options: Any,
) -> Batches:
    sources = [frame.images._source(columns) for frame in frames]
    first, *others = [(list(source.meta.columns), source.image) for source in sources]
    for other in others:
        if {*other[0]} != {*first[0]} or other[1] != first[1]:
            ours, theirs = (", ".join(map(repr, names)) for names, _ in (first, other))
            raise ArgumentError(
                f"mix_batches: the batches of one frame have {ours}, those of another {theirs}: "
                "pass columns= that all have, and rename the column of images if it has another "
                "name"
            )
    return Batches(sources, schedule=dataclasses.replace(schedule, epoch=epoch), **options)


def _normalize_weights(weights: object, count: int) -> np.ndarray:
    if weights is None:
        return np.full(count, 1 / count)
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        given = np.empty(0)
    if given.shape != (count,) or not (np.isfinite(given) & (given > 0)).all():
        raise ArgumentError(
            f"weights={shown(weights)}: pass a number above 0 for each of {count} frames"
        )
    # Scaled first: the sum of the largest floats is infinite, and no share may round to 0.
    scaled = np.maximum(given / given.max(), np.finfo(np.float64).tiny)
    return scaled / scaled.sum()
