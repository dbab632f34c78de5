"""``mix_batches``: batches with rows of several frames, by weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dask_image_ingest.arguments import check_choice, check_frame, shown
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.batch_format import FORMATS, Format
from dask_image_ingest.loader.iter_batches import Batches, Schedule, make_batches
from dask_image_ingest.loader.position import parse_shard
from dask_image_ingest.loader.sampling import parse_buckets, parse_sampling
from dask_image_ingest.typedefs import AnyFrame, PerChannel


def mix_batches(
    frames: Sequence[AnyFrame],
    batch_size: int,
    weights: Sequence[float] | None = None,
    *,
    stop: Literal["first", "all"] | None = None,
    format: Format = "numpy",
    columns: Sequence[str] | None = None,
    shuffle: int | None = None,
    epoch: int | None = None,
    steps: int | None = None,
    repeat: bool = False,
    balance: str | None = None,
    buckets: Sequence[tuple[int, int]] | tuple[int, int] | str | Sequence[str] | None = None,
    drop_last: bool = False,
    prefetch: int | None = None,
    start: int | Sequence[Any] = 0,
    shard: tuple[int, int] | Literal["auto"] | None = "auto",
    normalize: tuple[PerChannel, PerChannel] | None = None,
    channels_first: bool | None = None,
    collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
) -> Batches:
    """Stream batches of rows from several frames.

    Parameters
    ----------
    frames
        Dask, pandas or cuDF dataframes, all with the ``columns`` of the batches.
    batch_size
        Images in a batch.
    weights
        Relative share of each frame: numbers above 0, which need not add up to 1. By default an
        epoch has each row of all frames once, so that frames have the shares of their lengths.
    stop
        Where an epoch by ``weights`` ends: ``"first"``, the default, with the first frame that has
        no rows left, so that no row comes twice; ``"all"`` when each row has come, while frames
        that end before begin again. Not with ``steps`` or ``repeat``, which decide by themselves.
    format, columns
        As for :meth:`~pandas.DataFrame.images.iter_batches`, for each of the frames.
    shuffle, epoch
        As there. They also decide the order in which the frames take turns.
    steps, repeat
        As there: an epoch of so many batches, or one that never ends. A frame that ends begins
        again, in another order, and the next epoch goes on with the rows that follow.
    balance
        As there, for the rows of each frame: shares of the frames stay.
    buckets
        As there: a batch has rows of all frames, and of one bucket.
    drop_last, prefetch, start, shard, normalize, channels_first, collate_fn
        As there.

    Returns
    -------
    Batches
        An iterator of batches as from ``iter_batches``, with ``len`` and ``position``. The rows of
        a batch are grouped by frame, in the order of ``frames``. If the frames' images differ in
        shape, they are lists of arrays. With ``format="torch"`` it is a torch ``IterableDataset``
        too, for ``DataLoader(batches, batch_size=None, num_workers=2)``, with ``set_epoch`` and
        ``position_after`` as the dataset of ``dataloader`` has them; each loop begins again.

    Raises
    ------
    ArgumentError
        For an empty list of frames, invalid weights, ``stop`` without ``weights`` or with ``steps``
        or ``repeat``, and frames whose batches have different columns.

    Notes
    -----
    Each 1,024 rows have the shares of the frames, in random order. Each frame keeps its own
    partitions in memory.

    Examples
    --------
    >>> wide, tall = ddf[ddf.width > ddf.height], ddf[ddf.width <= ddf.height]
    >>> batch = next(mix_batches([wide, tall], 8, weights=[3, 1], columns=["cls"]))
    >>> batch["image"].shape, batch["cls"].shape
    ((8, 224, 224, 3), (8,))
    """
    check_choice("format", format, FORMATS)
    frames = list(frames)
    if not frames:
        raise ArgumentError("frames=[]: pass at least one dataframe with images")
    for frame in frames:
        check_frame(frame, "frames")
    schedule = Schedule(
        shuffle,
        None,
        steps,
        repeat,
        parse_sampling(None, balance, frames),
        parse_buckets(buckets, frames),
        _parse_weights(weights, len(frames)),
        stop,
    )
    make = functools.partial(
        make_batches,
        frames,
        columns,
        schedule,
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

    dataset = make_dataset(make, start, shard)
    if epoch is not None:
        dataset.set_epoch(epoch)
    return dataset


def _parse_weights(weights: object, count: int) -> np.ndarray | None:
    if weights is None:
        return None
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        given = np.empty(0)
    if given.shape != (count,) or not (np.isfinite(given) & (given > 0)).all():
        raise ArgumentError(
            f"weights={shown(weights)}: pass a number above 0 for each of {count} frames"
        )
    return given
