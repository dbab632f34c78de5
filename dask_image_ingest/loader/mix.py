"""``mix``: batches with rows of several frames, sampled by weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dask_image_ingest.arguments import check_flag, check_frame, shown, whole_number
from dask_image_ingest.dask_internals import FrameBase
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.loader.batch_format import Format
from dask_image_ingest.loader.iter_batches import Batches


def mix(
    frames: Sequence[Any],
    batch_size: int,
    weights: Sequence[float] | None = None,
    *,
    longest: bool = False,
    format: Format = "numpy",
    columns: Sequence[str] | None = None,
    shuffle: int | None = None,
    shuffle_buffer: int | str | None = None,
    drop_last: bool = False,
    prefetch: int | None = None,
    start: Sequence[Any] | None = None,
    shard: tuple[int, int] | Literal["auto"] | None = "auto",
    normalize: tuple[Any, Any] | None = None,
) -> MixedBatches:
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
    shuffle
        As there. The seed also determines how many rows of a batch come from each frame; without
        ``shuffle``, these numbers are the same each time.
    shuffle_buffer
        As there.
    drop_last
        Drop the last batch if it is smaller.
    prefetch
        As there.
    start
        The ``position`` of an earlier stream of the same frames and arguments, to resume from.
    shard, normalize
        As there.

    Returns
    -------
    MixedBatches
        An iterator of batches as from ``iter_batches``. The rows of a batch are grouped by frame,
        in the order of ``frames``. If the frames' images differ in shape, they are lists of arrays.
        The attribute ``position`` is a list that can be stored as JSON.

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
    >>> batch = next(mix([wide, tall], 8, weights=[3, 1], columns=["cls"]))
    >>> batch["image"].shape, batch["cls"].shape
    ((8, 224, 224, 3), (8,))
    """
    if not isinstance(frames, Sequence) or isinstance(frames, (str, bytes)) or not len(frames):
        raise ArgumentError(f"frames={shown(frames)}: pass a list of dataframes with images")
    for frame in frames:
        check_frame(frame._meta if isinstance(frame, FrameBase) else frame, "frames")
    size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
    check_flag("longest", longest)
    check_flag("drop_last", drop_last)
    shares = _normalize_weights(weights, len(frames))
    options = {
        "format": format,
        "columns": columns,
        "shuffle": shuffle,
        "shuffle_buffer": shuffle_buffer,
        "prefetch": prefetch,
        "shard": shard,
        "normalize": normalize,
    }
    return MixedBatches(
        lambda positions: [
            _FrameRows(frame, size, position, options)
            for frame, position in zip(frames, positions, strict=True)
        ],
        _parse_start(start, len(frames)),
        size=size,
        shares=shares,
        seed=shuffle or 0,
        longest=longest,
        drop_last=drop_last,
    )


class MixedBatches:
    """Iterator of batches, from :func:`~dask_image_ingest.mix`.

    A new loop over a finished iterator starts again, with the same batches. A new loop over one
    that was left early, closed or failed continues where it stopped.
    """

    def __init__(
        self,
        open_frames: Callable[[list[Any]], list[_FrameRows]],
        position: list[Any],
        *,
        size: int,
        shares: np.ndarray,
        seed: int,
        longest: bool,
        drop_last: bool,
    ) -> None:
        self._open_frames = open_frames
        self._size = size
        self._shares = shares
        self._seed = seed
        self._longest = longest
        self._drop_last = drop_last
        self._is_started = False
        self._seek(position)

    def _seek(self, position: list[Any]) -> None:
        self._drawn, *positions = position
        self._sources = self._open_frames(positions)
        self._position = [self._drawn, *(source.position for source in self._sources)]
        self._closed = self._is_over()

    @property
    def position(self) -> list[Any]:
        """Position of the next batch: pass it as ``start=`` to resume there."""
        return self._position

    def __iter__(self) -> MixedBatches:
        if self._closed and self._is_started:
            ended = self._is_over()
            self._seek(_parse_start(None, len(self._sources)) if ended else self._position)
        self._is_started = True
        return self

    def __next__(self) -> dict[str, Any]:
        if self._closed:
            raise StopIteration
        self._is_started = self._closed = True  # stays closed if this batch fails
        # Seeded by the batch's number, so that a resumed stream draws the same numbers.
        random = np.random.default_rng((self._seed, self._drawn))
        parts: list[list[Mapping[str, Any]]] = [[] for _ in self._sources]
        missing = self._size
        while missing and not self._is_over():
            weights = np.array([not source.over for source in self._sources]) * self._shares
            counts = random.multinomial(missing, weights / weights.sum())
            for source, count, taken in zip(self._sources, counts.tolist(), parts, strict=True):
                missing -= source.take(count, taken)
        rows = [part for taken in parts for part in taken]
        is_dropped = missing and (self._drop_last or not rows)
        batch = {} if is_dropped else _join(rows)
        self._drawn += 1
        self._position = [self._drawn, *(source.position for source in self._sources)]
        self._closed = self._is_over()
        if self._closed:
            self.close()
        if is_dropped:
            raise StopIteration
        return batch

    def _is_over(self) -> bool:
        over = [source.over for source in self._sources]
        return all(over) or (any(over) and not self._longest)

    def close(self) -> None:
        """Stop reading ahead and free what was read, as the end of the iteration does."""
        self._closed = True
        for source in self._sources:
            source.batches.close()

    def __repr__(self) -> str:
        shares = ", ".join(f"{share:.2f}" for share in self._shares)
        place = "at the end" if self._is_over() else f"after {self._drawn} batches"
        return f"<batches of {self._size} rows; {len(self._sources)} frames by {shares}; {place}>"


class _FrameRows:
    """Stream of one frame's rows, in portions of any size, cut from its batches.

    Its position: partition and row where its current batch begins, the rows of the batch that were
    taken, and whether the frame has no more rows.
    """

    def __init__(
        self, frame: Any, size: int, position: tuple[int, int, int, bool], options: dict[str, Any]
    ) -> None:
        *begin, self._used, self.over = position
        self.batches: Batches = frame.images.iter_batches(size, start=tuple(begin), **options)
        self._begin: Sequence[int] = begin
        self._image = frame.images.column
        self._batch: Mapping[str, Any] | None = None

    @property
    def position(self) -> list[Any]:
        return [*self._begin, self._used, self.over]

    def take(self, count: int, taken: list[Mapping[str, Any]]) -> int:
        """Append up to ``count`` rows to ``taken``; return how many there were."""
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


def _normalize_weights(weights: Any, count: int) -> np.ndarray:
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
    # Scaled first: the sum of the largest floats is infinite, and no share may round to 0.
    scaled = np.ldexp(shares, -np.frexp(shares.max())[1])
    scaled = np.maximum(scaled, np.finfo(np.float64).tiny)
    return scaled / scaled.sum()


def _parse_start(start: Any, count: int) -> list[Any]:
    """Parse the argument ``start=``: the number of the batch, and the position of each frame."""
    if start is None:
        return [0, *((0, 0, 0, False) for _ in range(count))]
    try:
        drawn, *positions = start
        positions = [(int(p), int(row), int(used), bool(over)) for p, row, used, over in positions]
        if len(positions) == count and min(drawn, *(min(each) for each in positions)) >= 0:
            return [int(drawn), *positions]
    except (TypeError, ValueError):
        pass
    raise ArgumentError(
        f"start={shown(start)}: pass the position of a stream of {count} frames, or None"
    )


def _join(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = [*parts[0]]
    for part in parts:
        if {*part} != {*names}:
            raise ArgumentError(
                f"mix: the batches of one frame have {', '.join(map(repr, names))}, those of "
                f"another {', '.join(map(repr, part))}: pass columns= that all have, and rename "
                "the column of images if it has another name"
            )
    return {name: _concatenate([part[name] for part in parts]) for name in names}


def _concatenate(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    are_arrays = not any(isinstance(part, list) for part in values)
    if not are_arrays or len({part.shape[1:] for part in values}) > 1:
        return [item for part in values for item in part]
    if hasattr(values[0], "detach"):
        import torch

        return torch.cat(values)
    return np.concatenate(values)  # CuPy arrays too, by NumPy's dispatch protocol
