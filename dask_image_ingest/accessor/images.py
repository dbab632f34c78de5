"""The methods of ``.images`` that eager and lazy frames share."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import dask.dataframe as dd
import pandas as pd
from numpy.typing import DTypeLike

from dask_image_ingest.arguments import (
    check_choice,
    check_flag,
    check_unique,
    column_names,
    whole_number,
)
from dask_image_ingest.dataset.references import Edge, make_pages, make_tiles
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import image_column, image_columns
from dask_image_ingest.loader import (
    FORMATS,
    Batches,
    Format,
    Schedule,
    make_batches,
    parse_buckets,
    parse_sampling,
    parse_shard,
)
from dask_image_ingest.ops import (
    ENCODED_FORMATS,
    apply_batch_map,
    encoded_images,
    make_batch_map,
    make_row_map,
    small_images,
)
from dask_image_ingest.typedefs import AnyFrame, AnySeries, PerChannel, TypeLike
from dask_image_ingest.view import Thumbnails, make_thumbnails

if TYPE_CHECKING:
    from typing import Self

    from dask_image_ingest.loader.dataloader import BatchLoader

# Return types of the methods: Dask's for lazy frames, those of pandas or cuDF for eager ones.
Frame = TypeVar("Frame")
Series = TypeVar("Series")


class Images(ABC, Generic[Frame, Series]):
    """The methods of ``.images``; those of eager frames compute at once."""

    def __init__(self, frame: AnyFrame) -> None:
        self._frame = frame
        # The image column chosen by ``images[column]``; None for the frame's default.
        self._chosen: str | None = None

    def __getitem__(self, column: str) -> Self:
        """Choose one of several image columns; returns an accessor with the same methods.

        Parameters
        ----------
        column
            Its name.

        Raises
        ------
        ArgumentError
            If the frame has no image column of this name.

        Examples
        --------
        >>> ddf.images["image"].column
        'image'
        """
        names = image_columns(self._meta())
        if column not in names:
            raise ArgumentError(
                f"images[{column!r}]: the frame's columns of images are "
                f"{', '.join(map(repr, names)) or 'none'}"
            )
        chosen = copy.copy(self)
        chosen._chosen = column
        return chosen

    @abstractmethod
    def _meta(self) -> Any:
        """An empty frame of these columns, or the frame itself."""

    @abstractmethod
    def _map(self, function: Callable[..., Any], columns: Sequence[str], *args: Any) -> Any:
        """``function(frame[columns], *args)`` for each partition."""

    def __repr__(self) -> str:
        columns = ", ".join(map(repr, self._columns()))
        try:
            image = self.column
        except ArgumentError as error:
            return f"<images of {columns}: {error}>"
        return f"<images in column {image!r}; columns {columns}>"

    @property
    def column(self) -> str:
        """The name of the image column, found by its type; of several, ``image``.

        Raises
        ------
        ArgumentError
            If the frame has no image column, or several of which none is called ``image``.
        """
        if self._chosen is not None:
            return self._chosen
        return image_column(self._meta())

    @abstractmethod
    def stack(
        self, shape: tuple[int, int, int] | None = None, *, dtype: DTypeLike | None = None
    ) -> Any:
        """Stack the images into one array.

        Parameters
        ----------
        shape
            (height, width, channels) of each image, if you know it and the query does not determine
            it.
        dtype
            The type of the values, ``"uint8"``, ``"uint16"`` or ``"float32"``. By default that of
            the images; for a lazy frame uint8, so pass it for images of ``mode="raw"``.

        Returns
        -------
        array, shape (n, height, width, channels), uint8 or ``dtype``
            NumPy on the pandas backend, CuPy on cuDF. For a lazy frame a dask array, with one chunk
            per partition, whose length along axis 0 is unknown until computed; the other lengths
            are known if the images are read with ``size=``, and no later step may have changed
            them. Images that are adjacent in memory, as in every decoded partition, are not copied:
            copy the array before you write to it.

        Raises
        ------
        ArgumentError
            If the images of a partition differ in shape: read with ``size=``. If one has values of
            another type: pass ``dtype=``. If a row has no image: drop it first,
            ``ddf[ddf.error.isna()]``. If the frame has no image column, or more than one.

        Notes
        -----
        If the shape is not known, an empty partition, such as after a filter, takes it from the
        others. So the first image of each partition is read before any is stacked: this reads
        shards twice, and, if it cannot be pushed into the read, keeps partitions in memory
        meanwhile. Pass ``shape=`` to avoid it.

        Examples
        --------
        >>> ddf = read_webdataset_images("train-{000..003}.tar", size=224)
        >>> good = ddf[ddf.error.isna()]
        >>> good.images.stack().mean(axis=(0, 1, 2)).compute().round(1)
        array([121.6,  98.1,  88.4])
        """

    @abstractmethod
    def vectors(self, column: str) -> Any:
        """A column of lists or arrays, such as embeddings, as one array.

        Parameters
        ----------
        column
            A column of lists of equal length, or of arrays of one shape, as from
            :meth:`map_batches`.

        Returns
        -------
        array, shape (n, length), or (n, ...) for arrays
            NumPy or CuPy, without a copy if the column is contiguous; for a lazy frame a dask
            array.

        Raises
        ------
        ArgumentError
            If the lists differ in length, or some are null: drop these rows first.

        Examples
        --------
        >>> frame["embedding"].iloc[0]
        [0.555..., 0.414..., 0.378...]
        >>> frame.images.vectors("embedding").shape
        (51, 3)
        """

    def map_batches(
        self,
        fn: Callable[..., Any],
        outputs: Mapping[str, TypeLike],
        *,
        inputs: Sequence[str] | None = None,
        batch_size: int = 256,
        keep_image: bool = False,
        skip_missing: bool = True,
        errors: Literal["raise", "null"] = "raise",
    ) -> Frame:
        """Call a function or a model with batches of images; add its results as columns.

        Image columns are dropped, unless ``keep_image=True``. To read fewer other columns, choose
        them afterwards: ``ddf.images.map_batches(...)[["__key__", "score"]]``.

        Parameters
        ----------
        fn
            Called with each batch: an array (n, height, width, channels) of uint8, NumPy or CuPy,
            or a list of arrays if shapes differ: read with ``size=``, and it is an array in every
            batch. These are copies, which it may change. It returns
            an array, a tensor or a list with a value for each image, or a dict of such; None in a
            list is null. A batch never spans partitions. A class, or a ``functools.partial`` of
            one, is instantiated once in each worker process, and the instance is called with the
            batches: load models in its constructor. A process keeps the eight instances used last.
        outputs
            The new columns and their types: ``"float32"``, ``"int64"``, ``"bool"``, ``"string"``,
            ``"binary"``; ``"float32[768]"`` or ``"float16[4, 64, 64]"`` for arrays of one shape,
            such as embeddings and latents; ``"list<float32>"`` for lists of any length,
            ``"list<float32[4]>"`` for any number of boxes, ``"list<string>"``; ``"struct<boxes:
            list<float32[4]>, name: string>"`` for dicts; ``"image"`` for arrays (height, width,
            channels) of uint8. A lazy frame needs its types before anything is computed. An output
            replaces a column of its name, but not ``__key__``, ``__url__``, ``offset``, ``nbytes``
            and ``error``, which say what a row is: drop these first.
        inputs
            The columns to pass to ``fn``, each as one argument, in this order; by default the image
            column alone. Numbers are passed as an array (n,), null floats as NaN. Lists are passed
            as a list of arrays; lists of vectors of one length as arrays (k, d). Arrays of one
            shape are passed as an array (n, ...). Structs are passed as a list of dicts, strings
            and anything else as a list of Python values. Null is None in lists. Only these
            columns and those that are kept are read: if no image column is among them, no image is
            decoded, and the frame need not have one.
        batch_size
            Rows in a batch, at most.
        keep_image
            Whether to keep the image columns.
        skip_missing
            Whether to skip rows without an image in one of the ``inputs``: their outputs are null.
            Otherwise ``fn`` gets None in place of the image, in a list.
        errors
            What to do with a row for which ``fn`` fails, as for images in a read: ``"raise"``
            raises, naming the row; ``"null"`` keeps it, with null outputs and the reason in the
            column ``error``, which is added if the frame has none. ``fn`` is called again with
            halves of the batch, until the row is found; others keep their results. A result that
            does not match ``outputs`` costs its row, too, if another has matched. Errors of memory,
            of the GPU and of imports are raised.

        Returns
        -------
        dataframe
            The kept columns and the outputs, which are null where there is no image, and where a
            float is None or NaN. Rows, index and divisions are those of the frame. Lazy for a lazy
            frame: only kept columns and inputs are read, and filters on other columns than the
            outputs run before any decode.

        Raises
        ------
        ArgumentError
            For outputs of unknown type, and unknown columns; when computed, if the result of ``fn``
            does not match ``outputs``, or the type cannot hold a number: integers and booleans must
            be exact, floats are rounded; with ``errors="null"`` only if no result matches. When
            computed, if integers or booleans of an input are null.
        FunctionError
            When computed, if ``fn`` fails, unless ``errors="null"``; if a class can't be
            instantiated.

        Examples
        --------
        >>> bright = ddf.images.map_batches(
        ...     lambda images: images.mean(axis=(1, 2, 3)), {"brightness": "float32"}
        ... )
        >>> bright[["__key__", "brightness"]].head(3).reset_index(drop=True)
          __key__  brightness
        0    0000  114.6...
        1    0001  129.1...
        2    0002  115.3...

        A model, loaded once per worker:

        >>> class Embed:
        ...     def __init__(self):
        ...         self.model = load_model()
        ...
        ...     def __call__(self, images):
        ...         return self.model(images)
        >>> embedded = ddf.images.map_batches(Embed, {"embedding": "float32[3]"})
        >>> embedded.dtypes["embedding"]
        float32[3]
        """
        arguments, kept = self._inputs_and_kept(inputs, keep_image)
        return apply_batch_map(
            self._frame,
            make_batch_map(fn, outputs, batch_size, arguments, skip_missing, kept, errors),
        )

    def map_rows(
        self,
        fn: Callable[..., Any],
        outputs: Mapping[str, TypeLike],
        *,
        inputs: Sequence[str] | None = None,
        concurrency: int = 16,
        retries: int = 4,
        keep_image: bool = False,
        skip_missing: bool = True,
        errors: Literal["raise", "null"] = "raise",
    ) -> Frame:
        """Call a function that waits, such as for a model server, with one row at a time.

        Several calls wait together. Image columns are dropped, unless ``keep_image=True``.

        Parameters
        ----------
        fn
            Called with the values of one row, by default its image: an array (height, width,
            channels) of NumPy, on cuDF too. It returns the value of the output, or a dict with a
            value for each; None is null. An ``async def`` function runs on one event loop of its
            process, any other in threads. A class, or a ``functools.partial`` of one, is
            instantiated once in each worker process, on that loop, and the instance is called:
            create clients in its constructor.
        outputs
            The new columns and their types, as for :meth:`map_batches`.
        inputs
            The columns to pass to ``fn``, each as one argument, in this order; by default the image
            column alone. Numbers and strings are passed as Python's own, lists of numbers as
            arrays, structs as dicts, null as None; null floats as NaN.
        concurrency
            How many calls of ``fn`` wait at a time in each worker process, at most.
        retries
            How often a call is tried again, after 0.5 seconds, 1, 2 ... up to 30, less up to half
            at random, or as long as the server asks by ``Retry-After``, ten minutes at most.
            Answers with the status 429, 5xx, 408 or 425, time-outs and errors of the connection are
            tried again. Clients may retry by themselves, too: turn that off in one of the two.
        keep_image
            Whether to keep the image columns.
        skip_missing
            Whether to skip rows without an image in one of the ``inputs``: their outputs are null.
            Otherwise ``fn`` gets None in place of the image.
        errors
            What to do with a row for which ``fn`` fails, after the retries: ``"raise"`` or
            ``"null"``, as for :meth:`map_batches`. If as many rows as ``concurrency`` (at least 16)
            fail one after the other because the server does not answer (the errors that are tried
            again, and the status 401 and 402), that is raised.

        Returns
        -------
        dataframe
            As for :meth:`map_batches`: the same rows, in their order.

        Raises
        ------
        ArgumentError
            As for :meth:`map_batches`.
        FunctionError
            When computed, if ``fn`` fails, unless ``errors="null"``; if a class can't be
            instantiated.

        Notes
        -----
        In a :func:`~dask_image_ingest.checkpoint` each result is written when it is there, to an
        object store every five seconds. A killed run repeats only the calls that were waiting, and
        there those of the last five seconds. Interrupting it ends the calls.

        Examples
        --------
        >>> import asyncio
        >>> async def describe(image, text):
        ...     await asyncio.sleep(0.01)  # in place of a server
        ...     return f"{text}, {image.shape[1]} pixels wide"
        >>> described = ddf.images.map_rows(
        ...     describe, {"caption": "string"}, inputs=["image", "txt"], concurrency=64
        ... )
        >>> described["caption"].head(1).iloc[0]
        'Eileen Collins in an orange space suit, before a flag, 224 pixels wide'
        """
        arguments, kept = self._inputs_and_kept(inputs, keep_image)
        return apply_batch_map(
            self._frame,
            make_row_map(
                fn,
                outputs,
                concurrency,
                retries,
                inputs=arguments,
                skip_missing=skip_missing,
                columns=kept,
                errors=errors,
            ),
        )

    def _inputs_and_kept(
        self, inputs: Sequence[str] | None, keep_image: bool
    ) -> tuple[list[str], list[str]]:
        """The columns that a function gets, and those that stay."""
        check_flag("keep_image", keep_image)
        existing, images = self._columns(), image_columns(self._meta())
        kept = [name for name in existing if keep_image or name not in images]
        default = [self.column] if inputs is None else inputs
        arguments = column_names(default, existing, "inputs")
        check_unique([*kept, *arguments], existing)
        if not arguments:
            raise ArgumentError("inputs=[]: name at least one column that the function gets")
        return arguments, kept

    def iter_batches(
        self,
        batch_size: int,
        *,
        format: Format = "numpy",
        columns: Sequence[str] | None = None,
        shuffle: int | None = None,
        epoch: int | None = None,
        steps: int | None = None,
        repeat: bool = False,
        weights: str | None = None,
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
        """Stream the rows as batches of arrays, a few of them in memory at a time.

        The rows of each step follow from the frame's rows, the seed and the epoch alone: step i has
        the same rows over all ranks, whatever their number and that of workers, as long as
        ``batch_size`` times ranks is the same.

        Parameters
        ----------
        batch_size
            Rows of a batch of this rank. A bad image makes its batch shorter, and moves no other
            row. The last batch may be smaller.
        format
            ``"numpy"``, ``"cupy"`` or ``"torch"``. Arrays and tensors share the memory of decoded
            images on its device, without a copy, except images made by ``normalize``: don't write
            to them, or a persisted frame changes.
        columns
            The other columns of a batch; all by default. Only these are read.
        shuffle
            A seed, for all epochs, or True for the seed 0: rows come in random order, a new one in
            each epoch. By default, and with False, they come in the order of the frame.
        epoch
            Number of the epoch, from 0: another order, and other numbers of random augmentations.
            By default 0, or the epoch of the position ``start``.
        steps
            Batches of an epoch: the next epoch continues with the rows that follow, and begins
            again when each has come once. By default an epoch is all rows once.
        repeat
            Whether the epoch never ends: pass follows pass, each in an order of its own.
        weights
            Name of a column of numbers from 0: rows are drawn with probabilities in proportion,
            some several times in an epoch, each time with an augmentation of its own.
        balance
            Name of a column, each value of which is drawn equally often; nulls are left out.
        buckets
            Sizes by aspect ratio, a list of (height, width), or (pixels, multiple) for all sizes of
            about so many pixels whose edges are multiples: each image is decoded to the size whose
            ratio is nearest to its own, in the columns ``height`` and ``width``, and what is over
            is cut off. Or the name of a column, or a list of names: a step has rows of one value,
            and of arrays or lists one shape, which come as one array (n, ...). All but the last
            step of each size, value or shape are full.
        drop_last
            Drop steps that are smaller: the last one, or that of each bucket.
        prefetch
            Pieces to read ahead, of up to 256 rows or 64 MiB of pixels, or one step if that has
            more; a piece is a whole partition where partitions come in order. They are read on the
            workers if there is a ``distributed`` client, else on a thread. By default 1; on a
            cluster two more than its workers have threads, at most 10; of cuDF two, which take
            memory of this process's GPU.
        start
            Where to begin: how many steps to skip, or the ``position`` of an earlier iterator, of
            any number of ranks and workers. What comes before it is not read.
        shard
            (rank, world): the part of each step that this process reads. By default taken from
            torch: with ``format="torch"`` the rank in ``torch.distributed``; workers of a
            ``DataLoader`` take steps in turn. None for all rows.
        normalize
            (mean, std) of values from 0 to 1, each a number or one for each channel: images are
            float32 with channels first, (value / 255 - mean) / std, made in one pass. All must have
            one shape.
        channels_first
            Whether images are (channels, height, width): True for all image columns, by views of
            the same memory; False also with ``normalize``. By default only images that it makes.
        collate_fn
            A function that makes the batch: it gets a list of rows, each a dict of NumPy arrays and
            values by column, and gives anything. It runs in the workers of a ``DataLoader``. A
            batch without rows is None, without a call.

        Returns
        -------
        Batches
            An iterator of dicts. Each has the image column, if the frame has one: an array (n,
            height, width, channels) of uint8, or a list of arrays if shapes differ, or with
            ``normalize`` an array (n, channels, height, width) of float32. The form of other
            columns follows from their type, never from the rows of a batch: numbers are an array
            (n,), with NaN for null floats; arrays of one shape, as ``"float32[768]"``, an array (n,
            768); lists a list with an array for each row, lists of vectors arrays (k, d) there;
            lists of strings a list of lists, structs a list of dicts, where null is None; strings a
            NumPy array of objects, for torch a list. Rows without an image are left out. ``len`` of
            it is the number of steps, the same for each rank. Its attribute ``position`` says where
            the next batch begins. A new loop over a finished iterator starts again, with the same
            batches.

        Raises
        ------
        ArgumentError
            If integers, booleans or arrays of one shape are null, or a column has other values than
            its declared dtype; for a position of other rows, or of another seed or epoch.
        MissingDependencyError
            If ``format`` needs CuPy or torch, and it is not installed.

        Notes
        -----
        A shuffle reads from 64 places of the shards in random order, and mixes the rows at each;
        from fewer where rows can't be decoded alone, as after a filter on pixels: at most 1 GiB of
        pixels, or two computed partitions, are held.

        After a shuffle, a merge or a sort of pixels, where each partition needs all those of the
        input, ``persist()`` the frame first.

        Examples
        --------
        >>> half = (0.5, 0.5)
        >>> for batch in ddf.images.iter_batches(32, columns=["cls"], shuffle=0, normalize=half):
        ...     loss = train_step(batch["image"], batch["cls"])
        """
        check_choice("format", format, FORMATS)
        return make_batches(
            [self._frame],
            columns,
            self._schedule(shuffle, steps, repeat, weights, balance, buckets),
            image=self._chosen,
            epoch=epoch,
            batch_size=batch_size,
            format=format,
            drop_last=drop_last,
            prefetch=prefetch,
            start=start,
            share=parse_shard(shard, format),
            normalize=normalize,
            channels_first=channels_first,
            collate_fn=collate_fn,
        )

    def _schedule(
        self,
        shuffle: int | None,
        steps: int | None,
        repeat: bool,
        weights: str | None,
        balance: str | None,
        buckets: Sequence[tuple[int, int]] | tuple[int, int] | str | Sequence[str] | None,
    ) -> Schedule:
        sampling = parse_sampling(weights, balance, [self._meta()])
        planned = parse_buckets(buckets, [self._meta()])
        return Schedule(shuffle, None, steps, repeat, sampling, planned)

    def dataloader(
        self,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: int | None = None,
        steps: int | None = None,
        repeat: bool = False,
        weights: str | None = None,
        balance: str | None = None,
        buckets: Sequence[tuple[int, int]] | tuple[int, int] | str | Sequence[str] | None = None,
        drop_last: bool = False,
        prefetch: int | None = None,
        start: int | Sequence[Any] = 0,
        shard: tuple[int, int] | Literal["auto"] | None = "auto",
        normalize: tuple[PerChannel, PerChannel] | None = None,
        channels_first: bool | None = None,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
        **options: Any,
    ) -> BatchLoader:
        """A torch ``DataLoader`` of batches of tensors, whose workers take steps in turn.

        Use it on a CPU, where worker processes decode while the model runs. On a GPU, or with a
        cluster, :meth:`iter_batches` itself reads ahead: on the GPU of this process, or by mapping
        pixels that CPU workers on this machine decode. Pixels that workers with GPUs decode are
        sent to this process.

        Parameters
        ----------
        batch_size, columns, shuffle, steps, repeat, weights, balance, buckets
            As for :meth:`iter_batches`.
        drop_last, prefetch, start, shard, normalize, channels_first, collate_fn
            As for :meth:`iter_batches`. ``start`` holds for the first loop, whatever the number of
            workers; later ones go through all of their epoch.
        **options
            Further arguments of ``DataLoader``: ``num_workers=4``, ``persistent_workers=True``,
            ``pin_memory=True``, ``multiprocessing_context="spawn"``.

        Returns
        -------
        torch.utils.data.DataLoader
            Its batches are those of :meth:`iter_batches`, in the same order, whatever the number of
            workers. All ranks of ``torch.distributed`` together yield each image once, in the same
            number of batches, which is its ``len``. Its ``dataset`` is an ``IterableDataset`` of
            batches: ``loader.dataset.set_epoch(epoch)`` changes the order of a shuffle and the
            numbers of random augmentations, with ``persistent_workers=True`` too, for all loops
            that follow; ``loader.dataset.position_after(steps)`` is an argument ``start=``, to
            resume with any number of ranks and workers. The loader's ``state_dict`` and
            ``load_state_dict``, as torchdata's ``StatefulDataLoader`` has them, save and resume a
            loop.

        Raises
        ------
        ArgumentError
            As :meth:`iter_batches`; with ``num_workers`` for images of the cuDF backend, since
            worker processes can't decode on the GPU: read with ``backend="pandas"``.
        MissingDependencyError
            If torch is not installed.

        Notes
        -----
        The workers compute locally, not on a cluster: pass the frame as it was before
        ``persist()``. Where ``iter_batches`` would hold computed partitions, each worker computes
        all of its rank: write what was computed with ``checkpoint``, or take ``iter_batches``.

        Examples
        --------
        >>> import torch
        >>> loader = ddf.images.dataloader(16, columns=["cls"], shuffle=0, num_workers=2)
        >>> sum(len(batch["cls"]) for batch in loader)
        51
        """
        from dask_image_ingest.loader.dataloader import make_dataloader

        make = functools.partial(
            make_batches,
            [self._frame],
            columns,
            self._schedule(shuffle, steps, repeat, weights, balance, buckets),
            image=self._chosen,
            batch_size=batch_size,
            format="torch",
            drop_last=drop_last,
            prefetch=prefetch,
            normalize=normalize,
            channels_first=channels_first,
            collate_fn=collate_fn,
        )
        return make_dataloader(make, start, shard, options)

    def show(
        self,
        n: int = 16,
        *,
        columns: Sequence[str] | None = None,
        mask: str | None = None,
        size: int = 160,
        storage_options: dict[str, Any] | None = None,
    ) -> Thumbnails:
        """Show the first images as thumbnails, in a notebook.

        Parameters
        ----------
        n
            How many rows.
        columns
            Columns to show below each: its title, then captions or scores, ``("__key__", "txt")``.
            By default ``__key__``, if the frame has it.
        mask
            An image column of labels to draw over the images, half transparent, in the palette of
            Pascal VOC; label 0 is not drawn.
        size
            The longer edge of a thumbnail, in pixels.
        storage_options
            For the filesystem of remote shards; by default those of the read.

        Returns
        -------
        Thumbnails
            Displayed by notebooks; ``save("page.html")`` writes it as a page. If images are still
            to be read, only these rows are decoded, at the size of a thumbnail. Images in memory,
            or made by a function (``map_batches``, ``transform=``), are computed and shrunk. An
            image that cannot be decoded shows its error.

        Examples
        --------
        >>> ddf[ddf.width >= 512].images.show(8, columns=("__key__", "txt"))
        <8 thumbnails, 0 without an image: shown in a notebook, or save()>
        """
        return make_thumbnails(
            self._frame,
            n,
            size,
            columns,
            storage_options,
            image=self._chosen,
            mask=None if mask is None else self[mask].column,
        )

    def encode(
        self, format: Literal["jpeg", "png", "webp"] = "jpeg", *, quality: int = 92
    ) -> Series:
        """Encode the images as files.

        Parameters
        ----------
        format
            ``"jpeg"``, for images with 1 or 3 channels; ``"png"`` or ``"webp"``, for 1 to 4. JPEG
            would change labels: it is an error for lazy frames read with ``mode="labels"``.
        quality
            1 to 100, for JPEG and for WebP with 3 channels. Other WebP is lossless, as PNG is.

        Returns
        -------
        series
            Bytes, with the name of the image column; null where there is no image. Encoded by
            Pillow, on the CPU. The original files are in the shards: ``nbytes`` bytes of
            ``__url__``, from ``offset`` on.

        Raises
        ------
        ArgumentError
            If the format does not support an image's channels, dtype or size; for a lazy frame,
            when computed.

        Examples
        --------
        >>> frame.images.encode("webp").iloc[0][:4]
        b'RIFF'
        """
        check_choice("format", format, tuple(ENCODED_FORMATS))
        quality = whole_number("quality", quality, 1, "choose 1 to 100", most=100)
        image = self.column
        return self._map(encoded_images, [image], image, format, quality)

    def thumbnails(
        self,
        size: int | tuple[int, int] = 160,
        *,
        resize: Literal["stretch", "crop", "pad", "shorter", "longer"] = "longer",
    ) -> Frame:
        """Shrink the images.

        Pixels are averaged; if all images have one channel, like masks, the nearest pixel is taken.
        Grey photographs become smoother if you read them with ``size=``.

        Parameters
        ----------
        size, resize
            As for ``read_webdataset_images``: by default the longer edge becomes ``size``.

        Returns
        -------
        dataframe
            The frame with small images in place of its own, for ``images.arrays()``, ``encode()``,
            or, if ``resize`` makes their shapes equal, ``stack()``. The pixels pass through host
            memory; read a whole dataset with ``size=`` instead. With ``resize="shorter"``, an image
            that would take more than 2 GiB becomes null.

        Examples
        --------
        >>> frame.images.thumbnails(64, resize="crop").images.stack().shape
        (51, 64, 64, 3)
        """
        columns = self._columns()
        check_unique(columns, columns)
        return self._map(small_images, columns, self.column, size, resize)

    def tiles(
        self,
        size: int | tuple[int, int],
        *,
        overlap: int | tuple[int, int] = 0,
        edge: Edge = "clip",
        image: str | Sequence[str] | None = None,
    ) -> Frame:
        """Make a row for each tile of each image, of a frame of references; nothing is decoded.

        Parameters
        ----------
        size
            Height and width of a tile in pixels, or (height, width).
        overlap
            Pixels that neighbours share, or (vertically, horizontally); less than ``size``.
        edge
            Tiles at the right and bottom edges: ``"clip"`` makes them smaller, ``"shift"`` moves
            them inwards, so that all have one size unless the image is smaller, and ``"drop"``
            leaves out what is no whole tile, also of an image smaller than that.
        image
            The column of references, by default the only one, or ``image``. Several, ``["image",
            "mask"]``, get the same tiles, and must have one height and width in each row.

        Returns
        -------
        dataframe
            Each row is repeated for its tiles, line by line, with its index label; the references
            are to the tiles, which ``decode_images`` decodes. ``height`` and ``width`` are those of
            the tile, and ``part.page``, ``part.top`` and ``part.left`` (int32) say where it is, in
            pixels of the upright page. An image whose header can't be read stays one row, with
            nulls. Lazy for a lazy frame.

        Raises
        ------
        ArgumentError
            If the frame has no such column of references, or no ``height`` and ``width`` of it.

        Examples
        --------
        >>> refs = read_webdataset_images("train-{000..003}.tar", decode=False)
        >>> tiles = refs.images.tiles(256, overlap=32)
        >>> places = tiles[["__key__", "part.top", "part.left", "height", "width"]]
        >>> places.head(4).reset_index(drop=True)
          __key__  part.top  part.left  height  width
        0    0000         0          0     256    256
        1    0000         0        224     256    256
        2    0000         0        448     256     64
        3    0000       224          0     256    256
        """
        return make_tiles(self._frame, size, overlap, edge, image)

    def pages(
        self, *, image: str | None = None, storage_options: dict[str, Any] | None = None
    ) -> Frame:
        """Make a row for each page of each image, of a frame of references; nothing is decoded.

        Pages of a TIFF are its directories, in their order; each is followed by the smaller copies
        of it that its SubIFDs hold. Animations in GIF, WebP and PNG have a page for each frame.
        Other files are not opened, if the frame has ``format``, ``height`` and ``width``.

        Parameters
        ----------
        image
            The column of references, by default the only one, or ``image``.
        storage_options
            For the filesystem of remote shards; by default those of the read.

        Returns
        -------
        dataframe
            As of :meth:`tiles`, with a row for each page. Images that can't be read stay one row.

        Raises
        ------
        ArgumentError
            If the frame has no such column of references, or its rows are parts already: take pages
            first, then their tiles.

        Examples
        --------
        >>> refs = read_webdataset_images("train-{000..003}.tar", decode=False)
        >>> len(refs.images.pages()) == len(refs)
        True
        """
        return make_pages(self._frame, image, storage_options)

    @abstractmethod
    def channel_stats(self) -> pd.DataFrame | dd.DataFrame:
        """Mean, standard deviation, minimum, maximum and number of pixels of each channel.

        Exact, by histograms of the values 0 to 255, in one pass.

        Returns
        -------
        pandas dataframe, one row per channel
            Lazy if the frame is.

        Examples
        --------
        >>> ddf.images.channel_stats().compute().round(1)
                  mean   std  min  max   pixels
        channel
        0        121.6  76.2    0  255  2558976
        1         98.1  63.1    0  255  2558976
        2         88.4  64.4    0  255  2558976
        """

    def _columns(self) -> list[str]:
        return list(self._frame.columns)


def as_frame(series: AnySeries) -> AnyFrame:
    """The series, of any backend, as a frame of one column."""
    return series.to_frame("image" if series.name is None else series.name)
