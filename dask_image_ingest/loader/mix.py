"""``mix``: batches with rows of several frames, by weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dask_image_ingest.arguments import check_flag, check_frame, shown, whole_number
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.iter_batches import Batches

# What iter_batches takes and is said of each frame, or of the mixture.
_OPTIONS = ("format", "columns", "shuffle", "shuffle_buffer", "prefetch", "shard", "normalize")


def mix(
    frames: Sequence[Any],
    batch_size: int,
    weights: Sequence[float] | None = None,
    *,
    seed: int = 0,
    longest: bool = False,
    drop_last: bool = False,
    start: Sequence[Any] | None = None,
    **options: Any,
) -> MixedBatches:
    """Stream batches whose rows come from several frames, each with its weight.

    Parameters
    ----------
    frames
        Dask, pandas or cuDF dataframes with images, of the same columns as far as they are asked
        for.
    batch_size
        Images in a batch.
    weights
        How likely a row is to be of each frame: numbers above 0, which need not add up to 1. By
        default all are equal.
    seed
        Draws how many rows of a batch are of each frame.
    longest
        Whether to go on with the other frames where one has no rows left, until each row of all
        frames has come once. By default the stream ends with the first frame that ends.
    drop_last
        Leave out a last batch that is smaller.
    start
        The ``position`` of an earlier stream, of the same frames and arguments, to go on from.
    **options
        Other arguments of :meth:`~pandas.DataFrame.images.iter_batches`, for each of the frames:
        ``format``, ``columns``, ``shuffle``, ``shuffle_buffer``, ``prefetch``, ``shard`` and
        ``normalize``.

    Returns
    -------
    MixedBatches
        An iterator of batches as those of ``iter_batches``. In a batch the rows of one frame come
        after those of the one before it. Images of frames that were read with different shapes are
        lists of arrays. Its attribute ``position`` is a list that JSON takes.

    Raises
    ------
    ArgumentError
        For fewer frames than one, weights that are none, and frames whose batches have different
        columns.

    Notes
    -----
    The numbers of rows in a batch are drawn from the multinomial distribution of the weights, as
    if each row was drawn by itself. Each frame keeps partitions of its own in memory.

    Examples
    --------
    >>> wide, tall = ddf[ddf.width > ddf.height], ddf[ddf.width <= ddf.height]
    >>> batch = next(mix([wide, tall], 8, weights=[3, 1], columns=["cls"]))
    >>> batch["image"].shape, batch["cls"].shape
    ((8, 224, 224, 3), (8,))
    """
    unknown = sorted(options.keys() - {*_OPTIONS})
    if unknown:
        raise ArgumentError(f"mix: {unknown[0]}= is none of {', '.join(_OPTIONS)}")
    if not isinstance(frames, Sequence) or isinstance(frames, (str, bytes)) or not len(frames):
        raise ArgumentError(f"frames={shown(frames)}: pass a list of dataframes with images")
    for frame in frames:
        check_frame(frame._meta if isinstance(frame, FrameBase) else frame, "frames")
    size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
    seed = whole_number("seed", seed, 0, "pass a number from 0")
    check_flag("longest", longest)
    check_flag("drop_last", drop_last)
    places = _places(start, len(frames))
    sources = [
        _Source(frame, size, place, options)
        for frame, place in zip(frames, places[1:], strict=True)
    ]
    shares = _shares(weights, len(frames))
    return MixedBatches(sources, size, shares, seed, longest, drop_last, places[0])


class MixedBatches:
    """An iterator of the batches of :func:`mix`."""

    def __init__(
        self,
        sources: list[_Source],
        size: int,
        shares: np.ndarray,
        seed: int,
        longest: bool,
        drop_last: bool,
        drawn: int,
    ) -> None:
        self._sources = sources
        self._size = size
        self._shares = shares
        self._seed = seed
        self._longest = longest
        self._drop_last = drop_last
        self._drawn = drawn
        self._over = self._is_over()

    @property
    def position(self) -> list[Any]:
        """The beginning of the next batch: give it to ``start=`` to go on from there."""
        return [self._drawn, *(source.place for source in self._sources)]

    def __iter__(self) -> MixedBatches:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._over:
            raise StopIteration
        # By the number of the batch: a stream that goes on draws what one without a break does.
        random = np.random.default_rng((self._seed, self._drawn))
        parts: list[list[Mapping[str, Any]]] = [[] for _ in self._sources]
        missing = self._size
        while missing and not self._over:
            left = np.array([not source.over for source in self._sources]) * self._shares
            counts = random.multinomial(missing, left / left.sum())
            for source, count, taken in zip(self._sources, counts.tolist(), parts, strict=True):
                missing -= source.take(count, taken)
            self._over = self._is_over()
        self._drawn += 1
        if self._over:
            self.close()
        if missing and (self._drop_last or missing == self._size):
            raise StopIteration
        return _joined([part for taken in parts for part in taken])

    def _is_over(self) -> bool:
        over = [source.over for source in self._sources]
        return all(over) or (any(over) and not self._longest)

    def close(self) -> None:
        """Stop reading ahead and free what was read, as the end of the iteration does."""
        self._over = True
        for source in self._sources:
            source.batches.close()

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.2f}" for share in self._shares)
        return f"<MixedBatches of {self._size} rows from {len(self._sources)} frames: {shares}>"


class _Source:
    """Rows of one frame, as many as are asked for at a time.

    Its place: partition and row where the current batch begins, rows of it that were taken, and
    whether there are none left.
    """

    def __init__(
        self, frame: Any, size: int, place: tuple[int, int, int, bool], options: dict[str, Any]
    ) -> None:
        *begin, self._used, self.over = place
        # A position of iter_batches is a tuple; a number is one of batches.
        self.batches: Batches = frame.images.iter_batches(size, start=tuple(begin), **options)
        self._begin: Sequence[int] = begin
        self._image = frame.images.column
        self._batch: Mapping[str, Any] | None = None

    @property
    def place(self) -> list[Any]:
        return [*self._begin, self._used, self.over]

    def take(self, count: int, taken: list[Mapping[str, Any]]) -> int:
        """Add the next ``count`` rows to what was ``taken``; how many there were."""
        missing = count
        while missing and not self.over:
            if self._batch is None:
                self._batch = next(self.batches, None)
            if self._batch is None:
                self.over = True
                break
            stop = min(self._used + missing, len(self._batch[self._image]))
            rows = slice(self._used, stop)
            taken.append({name: values[rows] for name, values in self._batch.items()})
            missing -= stop - self._used
            self._used = stop
            if stop == len(self._batch[self._image]):
                self._batch, self._begin, self._used = None, [*self.batches.position], 0
        return count - missing


def _shares(weights: Any, count: int) -> np.ndarray:
    if weights is None:
        return np.full(count, 1 / count)
    try:
        shares = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        shares = np.empty(0)
    if shares.shape != (count,) or not (np.isfinite(shares) & (shares > 0)).all():
        raise ArgumentError(
            f"weights={shown(weights)}: pass a number above 0 for each of {count} frames"
        )
    return shares / shares.sum()


def _places(start: Any, count: int) -> list[Any]:
    """The number of the batch, and the place of each frame."""
    if start is None:
        return [0, *((0, 0, 0, False) for _ in range(count))]
    try:
        drawn, *places = start
        places = [(int(p), int(row), int(used), bool(over)) for p, row, used, over in places]
        if len(places) == count and min(drawn, *(min(place) for place in places)) >= 0:
            return [int(drawn), *places]
    except (TypeError, ValueError):
        pass
    raise ArgumentError(
        f"start={shown(start)}: pass the position of a stream of {count} frames, or None"
    )


def _joined(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = [*parts[0]]
    for part in parts:
        if {*part} != {*names}:
            raise ArgumentError(
                f"mix: the batches of one frame have {', '.join(map(repr, names))}, those of "
                f"another {', '.join(map(repr, part))}: pass columns= that all have, and rename "
                "the column of images where it has another name"
            )
    return {name: _concatenated([part[name] for part in parts]) for name in names}


def _concatenated(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    alike = not any(isinstance(each, list) for each in values)
    if not alike or len({each.shape[1:] for each in values}) > 1:
        return [item for each in values for item in each]
    if hasattr(values[0], "detach"):
        import torch

        return torch.cat(values)
    return np.concatenate(values)  # of CuPy arrays too, by its protocol
