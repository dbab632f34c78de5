"""``mix``: batches with rows of several frames, by weights."""

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
    longest
        Whether to go on with the other frames where one has no rows left, until each row of all
        frames has come once. By default the stream ends with the first frame that ends.
    format, columns
        As for :meth:`~pandas.DataFrame.images.iter_batches`, for each of the frames.
    shuffle
        As there. The seed also draws how many rows of a batch are of each frame; without one these
        numbers are the same each time.
    shuffle_buffer
        As there.
    drop_last
        Leave out a last batch that is smaller.
    prefetch
        As there.
    start
        The ``position`` of an earlier stream, of the same frames and arguments, to go on from.
    shard, normalize
        As there.

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
    if not isinstance(frames, Sequence) or isinstance(frames, (str, bytes)) or not len(frames):
        raise ArgumentError(f"frames={shown(frames)}: pass a list of dataframes with images")
    for frame in frames:
        check_frame(frame._meta if isinstance(frame, FrameBase) else frame, "frames")
    size = whole_number("batch_size", batch_size, 1, "pass a positive number of images")
    check_flag("longest", longest)
    check_flag("drop_last", drop_last)
    shares = _shares(weights, len(frames))
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
        lambda places: [
            _Source(frame, size, place, options)
            for frame, place in zip(frames, places, strict=True)
        ],
        _places(start, len(frames)),
        size=size,
        shares=shares,
        seed=shuffle or 0,
        longest=longest,
        drop_last=drop_last,
    )


class MixedBatches:
    """An iterator of the batches of :func:`mix`.

    A loop over one that has ended begins again, with the same batches. A loop over one that was
    left, closed or has failed goes on where it was.
    """

    def __init__(
        self,
        begin: Callable[[list[Any]], list[_Source]],
        position: list[Any],
        *,
        size: int,
        shares: np.ndarray,
        seed: int,
        longest: bool,
        drop_last: bool,
    ) -> None:
        self._begin = begin
        self._size = size
        self._shares = shares
        self._seed = seed
        self._longest = longest
        self._drop_last = drop_last
        self._begun = False
        self._go_to(position)

    def _go_to(self, position: list[Any]) -> None:
        self._drawn, *places = position
        self._sources = self._begin(places)
        self._position = [self._drawn, *(source.place for source in self._sources)]
        self._closed = self._is_over()

    @property
    def position(self) -> list[Any]:
        """The beginning of the next batch: give it to ``start=`` to go on from there."""
        return self._position

    def __iter__(self) -> MixedBatches:
        if self._closed and self._begun:
            ended = self._is_over()
            self._go_to(_places(None, len(self._sources)) if ended else self._position)
        self._begun = True
        return self

    def __next__(self) -> dict[str, Any]:
        if self._closed:
            raise StopIteration
        self._begun = self._closed = True  # until this batch is made
        # By the number of the batch: a stream that goes on draws what one without a break does.
        random = np.random.default_rng((self._seed, self._drawn))
        parts: list[list[Mapping[str, Any]]] = [[] for _ in self._sources]
        missing = self._size
        while missing and not self._is_over():
            left = np.array([not source.over for source in self._sources]) * self._shares
            counts = random.multinomial(missing, left / left.sum())
            for source, count, taken in zip(self._sources, counts.tolist(), parts, strict=True):
                missing -= source.take(count, taken)
        rows = [part for taken in parts for part in taken]
        is_left_out = missing and (self._drop_last or not rows)
        batch = {} if is_left_out else _joined(rows)
        self._drawn += 1
        self._position = [self._drawn, *(source.place for source in self._sources)]
        self._closed = self._is_over()
        if self._closed:
            self.close()
        if is_left_out:
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
