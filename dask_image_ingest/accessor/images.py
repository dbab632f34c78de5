"""The methods of ``.images``, which eager and lazy frames share."""

from __future__ import annotations

import copy
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
from dask_image_ingest.errors import ArgumentError
from dask_image_ingest.frames import image_columns, reference_columns
from dask_image_ingest.loader import FORMATS, Batches, Format, Source, parse_shard
from dask_image_ingest.ops import (
    encoded_images,
    make_batch_map,
    small_images,
)
from dask_image_ingest.view import Thumbnails, make_thumbnails

if TYPE_CHECKING:
    from typing import Self

    from dask_image_ingest.loader.torch_dataset import BatchLoader, TorchDataset

# What the methods give: those of Dask, or those of pandas or cuDF, of which the data tells which.
Frame = TypeVar("Frame")
Series = TypeVar("Series")


class Images(ABC, Generic[Frame, Series]):
    """The methods of ``.images``: eager frames compute at once, lazy ones when asked."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self._chosen: str | None = None

    def __getitem__(self, column: str) -> Self:
        """The same methods for one of several image columns.

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

    def _shape(self, image: str) -> str | None:
        """The shape of the images, as far as it is known without a look at each."""
        return None

    @abstractmethod
    def _facts(self, image: str) -> list[str]:
        """Facts about the images that are known without computing, as phrases."""

    def __repr__(self) -> str:
        columns = ", ".join(map(repr, self._columns()))
        try:
            image = self.column
        except ArgumentError as error:
            return f"<images of {columns}: {error}>"
        told = "; ".join([f"images in column {image!r}", *self._facts(image), f"columns {columns}"])
        return f"<{told}>"

    @property
    def column(self) -> str:
        """The name of the image column, told by its type; of several ``image``.

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
            (height, width, channels) of each image, where the query does not tell it and you know.
        dtype
            The type of the values, ``"uint8"``, ``"uint16"`` or ``"float32"``. By default that of
            the images, and of a lazy frame uint8: say it for images of ``mode="raw"``.

        Returns
        -------
        array, shape (n, height, width, channels), uint8 or ``dtype``
            NumPy on the pandas backend, CuPy on cuDF. Of a lazy frame a dask array, with one chunk
            per partition, whose length along axis 0 is unknown until computed; the other lengths
            are known where the images are read with ``size=``, and nothing that was done to them
            since may have changed it. Images that lie side by side in memory, as in every partition
            that was just decoded, are not copied: copy the array before you write to it.

        Raises
        ------
        ArgumentError
            If the images of a partition differ in shape: read with ``size=``. If one has values of
            another type: pass ``dtype=``. If a row has no
            image: drop it first, ``ddf[ddf.error.isna()]``. If the frame has no image column, or
            more than one.

        Notes
        -----
        Where the shape is not known, a partition without any image, as a filter may leave it, has
        to learn it from the others. So the first image of each is looked at before any of them is
        stacked: that reads shards twice, and where it can't go down to the read, keeps partitions
        in memory meanwhile. ``shape=`` spares it.

        Examples
        --------
        >>> ddf = read_webdataset_images("train-{000..003}.tar", size=224)
        >>> good = ddf[ddf.error.isna()]
        >>> good.images.stack().mean(axis=(0, 1, 2)).compute().round(1)
        array([121.6,  98.1,  88.4])
        """

    @abstractmethod
    def vectors(self, column: str) -> Any:
        """A column of lists as one array, of embeddings for example.

        Parameters
        ----------
        column
            A column of lists of equal length, such as :meth:`map_batches` makes.

        Returns
        -------
        array, shape (n, length)
            NumPy or CuPy, without a copy where the column is one piece; of a lazy frame a dask
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
        outputs: Mapping[str, Any],
        *,
        inputs: Sequence[str] | None = None,
        batch_size: int = 256,
        keep_image: bool = False,
        columns: Sequence[str] | None = None,
        skip_missing: bool = True,
    ) -> Frame:
        """A frame with columns that a function or a model makes of the images, batch by batch.

        Columns of images are left out, unless ``keep_image=True``.

        Parameters
        ----------
        fn
            Called with each batch: an array (n, height, width, channels) of uint8, NumPy or CuPy,
            or a list of arrays where shapes differ: copies, which it may change. It gives an array
            (or a tensor, or a list of strings) with a value for each image, or a dict of such. A
            batch never reaches across partitions. A class, or a ``functools.partial`` of one, is
            called once in each worker process, and what it makes is called with the batches: load
            models there. A process keeps the eight that it used last.
        outputs
            The new columns and their types: ``"float32"``, ``"int64"``, ``"bool"``, ``"string"``,
            ``"binary"``; ``"list<float32>"`` where ``fn`` gives (n, d); ``"image"`` where it gives
            an array (n, height, width, channels) of uint8, or a list of arrays. A lazy frame has to
            know its types before anything is computed. No column that is kept may have such a name.
        inputs
            The columns that ``fn`` gets, each as one argument, in this order; by default the image
            column alone. Numbers come as an array (n,), nulls of floats as NaN. Lists come as a
            list of arrays, of lists of lists (k, d) where their lengths are one. Strings and
            anything else come as a list, of Python's values. Null is None in lists. Only these
            columns and those that are kept are read: no image is decoded where none is named, and
            the frame need not have any.
        batch_size
            Rows in a batch, at most.
        keep_image
            Whether the result has the image columns too.
        columns
            The other columns to keep; by default all, of images only with ``keep_image=True``.
        skip_missing
            Whether ``fn`` gets no row that lacks an image which ``inputs`` names: the outputs are
            null there. Otherwise it gets None in place of the image, in a list.

        Returns
        -------
        dataframe
            The kept columns and the outputs, which are null where there is no image. Rows, index
            and divisions are those of the frame. Of a lazy frame a lazy one: only what is kept is
            read, and filters that don't look at the outputs run before any image is decoded.

        Raises
        ------
        ArgumentError
            For outputs of unknown type or with the name of a column that is kept, unknown columns;
            when computed, if ``fn`` gives something else than ``outputs`` says, or a number that
            the type can't hold: whole numbers and truth values have to be there exactly, floats are
            rounded. When computed, if whole numbers or truth values of an input are null.
        FunctionError
            When computed, if ``fn`` fails.

        Examples
        --------
        >>> bright = ddf.images.map_batches(
        ...     lambda images: images.mean(axis=(1, 2, 3)), {"brightness": "float32"}
        ... )
        >>> bright[["__key__", "brightness"]].head(3)
          __key__  brightness
        0    0000  114.6...
        1    0001  129.1...
        2    0002  115.3...

        Images of one's own:

        >>> mirrored = ddf.images.map_batches(lambda images: images[:, :, ::-1], {"image": "image"})
        >>> mirrored.head(1).images.arrays()[0].shape
        (224, 224, 3)

        Pictures beside their captions:

        >>> def letters_per_pixel(images, captions):
        ...     return [len(text) / image[..., 0].size for image, text in zip(images, captions)]
        >>> scored = ddf.images.map_batches(
        ...     letters_per_pixel, {"score": "float32"}, inputs=["image", "txt"]
        ... )
        >>> float(scored["score"].head(1).iloc[0])
        0.00105...

        A model, loaded once per worker:

        >>> class Embed:
        ...     def __init__(self):
        ...         self.model = load_model()
        ...
        ...     def __call__(self, images):
        ...         return self.model(images)
        >>> embedded = ddf.images.map_batches(Embed, {"embedding": "list<float32>"})
        >>> embedded.dtypes["embedding"]
        list<float32>
        """
        check_flag("keep_image", keep_image)
        known, pictures = self._columns(), image_columns(self._meta())
        image = self.column if inputs is None or keep_image else None
        others = self._others(columns, image)
        if columns is None and not keep_image:
            others = [name for name in others if name not in pictures]
        kept = [c for c in known if c in others or (keep_image and c == image)]
        chosen: list[Any] = [image]
        if inputs is not None:
            chosen = column_names(inputs, known, "inputs")
        check_unique(chosen, known)
        if not chosen:
            raise ArgumentError("inputs=[]: name at least one column that the function gets")
        return self._map_batches(
            make_batch_map(fn, outputs, batch_size, chosen, skip_missing, kept)
        )

    @abstractmethod
    def _map_batches(self, batch_map: Any) -> Any: ...

    def iter_batches(
        self,
        batch_size: int,
        *,
        format: Format = "numpy",
        columns: Sequence[str] | None = None,
        shuffle: int | None = None,
        shuffle_buffer: int | str | None = None,
        drop_last: bool = False,
        prefetch: int | None = None,
        start: int | Sequence[int] = 0,
        shard: tuple[int, int] | Literal["auto"] | None = "auto",
        normalize: tuple[Any, Any] | None = None,
    ) -> Batches:
        """Stream the rows as batches of arrays, with a few partitions in memory at a time.

        Parameters
        ----------
        batch_size
            Images in a batch. Batches reach across partitions; the last one may be smaller.
        format
            ``"numpy"``, ``"cupy"`` or ``"torch"``. Arrays and tensors share the partition's memory
            on its device, without a copy, but for images that ``normalize`` makes: don't write to
            them, or the frame that was persisted changes.
        columns
            The other columns to have; all by default. Only these are read.
        shuffle
            A seed: partitions come in another order, and their rows are mixed in a buffer. Take
            another seed for each epoch.
        shuffle_buffer
            How many rows to mix: the partitions that have as many together, or one that has more.
            Or how many bytes of pixels to hold, such as ``"2 GiB"``, of up to 16 partitions; by
            default ``"1 GiB"``. Where the images of local files would be more, their rows are mixed
            all the same, and decoded after that; elsewhere fewer partitions are mixed, two at
            least. The order depends on the seed and on this, not on ``batch_size`` and
            ``prefetch``.
        drop_last
            Leave out a last batch that is smaller.
        prefetch
            Partitions that are read ahead while one is used: on the workers where there is a
            ``distributed`` client, else on a thread. So at most ``prefetch + 1`` partitions are in
            memory, and those in the buffer of a shuffle, whatever the size of the frame. Where a
            shuffle decodes rows that are mixed, it is up to 1,024 of these, of files of 16 MiB, in
            place of a partition. By default 1; on a cluster two more than its workers have threads,
            and no more than 10.
        start
            Where to begin. A number of batches to leave out, which are decoded to find the place.
            Or the ``position`` of an earlier iterator: nothing before it is read; with a shuffle,
            as many partitions before it as its buffer has. The
            batches are those of an iteration that was not interrupted, where the rows come in the
            same order again, as those of a read and of a shuffle of its pointers do; Dask's merges,
            and its sorts of equal keys, may have another one.
        shard
            (rank, world): only every world-th partition, from that of this rank on, so that so many
            processes have each image once together. A shuffle orders the partitions before they
            share them. By default what torch tells: workers of a ``DataLoader`` share, and with
            ``format="torch"`` the ranks of ``torch.distributed``. None for all of the frame.
        normalize
            (mean, std) of values from 0 to 1, each a number or one for each channel: images come as
            float32 and channels first, (value / 255 - mean) / std, made in one pass. They have to
            be of one shape.

        Returns
        -------
        Batches
            An iterator of dicts. Each has the image column: an array (n, height, width, channels)
            of uint8, or a list of arrays where shapes differ, or with ``normalize`` an array (n,
            channels, height, width) of float32. And the other columns: arrays (n,), of lists (n,
            d), of strings NumPy arrays of objects, lists for torch. Rows without an image are left
            out.
            Its attribute ``position`` says where the next batch begins. A loop over batches that
            have ended begins again, with the same ones; take another seed for another order.

        Raises
        ------
        ArgumentError
            If a column has nulls and so can't be an array.
        MissingDependencyError
            If CuPy or torch is asked for and not installed.

        Notes
        -----
        Each partition is computed by itself. After a shuffle, a merge or a sort, where each needs
        all of those before, ``persist()`` the frame first.

        Examples
        --------
        >>> half = (0.5, 0.5)
        >>> for batch in ddf.images.iter_batches(32, columns=["cls"], shuffle=0, normalize=half):
        ...     loss = train_step(batch["image"], batch["cls"])
        """
        image = self.column
        check_choice("format", format, FORMATS)
        chosen = [image, *self._others(columns, image)]
        if twice := sorted({str(name) for name in chosen if chosen.count(name) > 1}):
            raise ArgumentError(
                f"iter_batches: {', '.join(map(repr, twice))} would be in a batch twice: name each "
                "column once in columns="
            )
        rank, world = parse_shard(shard, format)
        return Batches(
            self._source(chosen, image, world),
            self._meta()[chosen],
            image,
            shape=self._shape(image),
            batch_size=batch_size,
            format=format,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            drop_last=drop_last,
            prefetch=prefetch,
            start=start,
            shard=(rank, world),
            normalize=normalize,
        )

    @abstractmethod
    def _source(self, columns: list[str], image: str, world: int) -> Source: ...

    def torch_dataset(
        self,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: int | None = None,
        shuffle_buffer: int | str | None = None,
        drop_last: bool = False,
        prefetch: int | None = None,
        normalize: tuple[Any, Any] | None = None,
    ) -> TorchDataset:
        """Batches of tensors for a torch ``DataLoader``, whose workers share them.

        On a CPU, where worker processes decode while the model runs. On a GPU, or with a cluster,
        :meth:`iter_batches` itself reads ahead: on the GPU of this process, or by mapping what the
        CPU workers of this machine decode. What workers with GPUs decode is sent to this process.

        Parameters
        ----------
        batch_size, columns, shuffle, shuffle_buffer, drop_last, prefetch, normalize
            As for :meth:`iter_batches`, of each worker and rank by itself: a worker's last batch
            may be smaller.

        Returns
        -------
        torch.utils.data.IterableDataset
            For ``DataLoader(dataset, batch_size=None, num_workers=4)``, as :meth:`dataloader` makes
            it: it gives whole batches, of which another batch size would make batches. Each image
            comes once from all workers and, where ``torch.distributed`` runs, all ranks together;
            ranks may have different numbers of batches. ``set_epoch(epoch)`` has another order
            after a shuffle, with ``persistent_workers=True`` too. It has ``state_dict`` and
            ``load_state_dict``, by which torchdata's ``StatefulDataLoader`` goes on where it
            stopped.

        Raises
        ------
        ArgumentError
            As :meth:`iter_batches`.
        MissingDependencyError
            If torch is not installed.

        Notes
        -----
        Partitions are what is shared: with fewer of them than workers, some workers have none. The
        workers compute by themselves, and not on a cluster: pass the frame as it was before
        ``persist()``.

        Examples
        --------
        >>> from torch.utils.data import DataLoader
        >>> dataset = ddf.images.torch_dataset(16, columns=["cls"], shuffle=0)
        >>> loader = DataLoader(dataset, batch_size=None, num_workers=2)
        >>> sum(len(batch["cls"]) for batch in loader)
        51
        """
        from dask_image_ingest.loader.torch_dataset import TorchDataset

        options = {
            "batch_size": batch_size,
            "columns": columns,
            "shuffle": shuffle,
            "shuffle_buffer": shuffle_buffer,
            "drop_last": drop_last,
            "prefetch": prefetch,
            "normalize": normalize,
        }
        return TorchDataset(self._frame, options)

    def dataloader(
        self,
        batch_size: int,
        *,
        columns: Sequence[str] | None = None,
        shuffle: int | None = None,
        shuffle_buffer: int | str | None = None,
        drop_last: bool = False,
        prefetch: int | None = None,
        normalize: tuple[Any, Any] | None = None,
        **options: Any,
    ) -> BatchLoader:
        """A torch ``DataLoader`` of batches of tensors, whose workers share them.

        Parameters
        ----------
        batch_size, columns, shuffle, shuffle_buffer, drop_last, prefetch, normalize
            As for :meth:`torch_dataset`.
        **options
            Further arguments of ``DataLoader``: ``num_workers=4``, ``persistent_workers=True``,
            ``pin_memory=True``, ``multiprocessing_context="spawn"``.

        Returns
        -------
        torch.utils.data.DataLoader
            Its ``dataset`` is a :meth:`torch_dataset`: ``loader.dataset.set_epoch(epoch)``.

        Raises
        ------
        ArgumentError
            As :meth:`iter_batches`, and for options that such a ``DataLoader`` refuses.
        MissingDependencyError
            If torch is not installed.

        Examples
        --------
        >>> import torch
        >>> loader = ddf.images.dataloader(16, columns=["cls"], shuffle=0, num_workers=2)
        >>> sum(len(batch["cls"]) for batch in loader)
        51
        """
        # Before the dataset, since its module says that torch is missing.
        from dask_image_ingest.loader.torch_dataset import make_dataloader

        dataset = self.torch_dataset(
            batch_size,
            columns=columns,
            shuffle=shuffle,
            shuffle_buffer=shuffle_buffer,
            drop_last=drop_last,
            prefetch=prefetch,
            normalize=normalize,
        )
        return make_dataloader(dataset, options)

    def show(
        self,
        n: int = 16,
        *,
        thumbnail: int = 160,
        columns: Sequence[str] | None = None,
        mask: str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> Thumbnails:
        """Show the first images as thumbnails, in a notebook.

        Parameters
        ----------
        n
            How many rows.
        thumbnail
            The longer edge of a thumbnail, in pixels.
        columns
            What stands below each: its name, then captions or scores, ``("__key__", "txt")``. By
            default ``__key__``, where the frame has it.
        mask
            An image column of labels to draw over the images: label 0 shows the image, each other
            one half of its colour in the palette of Pascal VOC.
        storage_options
            For the filesystem of remote shards; by default those of the read.

        Returns
        -------
        Thumbnails
            Shown by notebooks; ``save("page.html")`` makes a page of it. Of images that are still
            to be read, the encoded bytes of these rows are decoded at the size of a thumbnail, and
            no others. Images that are in memory, or that a function makes (``map_batches``,
            ``transform=``), are shown as they are. An image that can't be decoded shows its error.

        Examples
        --------
        >>> ddf[ddf.width >= 512].images.show(8, columns=("__key__", "txt"))
        <8 thumbnails, 0 without an image: shown in a notebook, or save()>
        """
        return make_thumbnails(
            self._frame,
            n,
            thumbnail,
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
            ``"jpeg"``, of images with 1 or 3 channels, ``"png"`` or ``"webp"``, of 1 to 4. JPEG
            changes labels: a lazy frame that was read with ``mode="labels"`` refuses it.
        quality
            1 to 100, of JPEG and of WebP with 3 channels. Other WebP is lossless, as PNG is.

        Returns
        -------
        series
            Bytes, named as the image column; null where there is no image. Pillow encodes them, on
            the CPU. The files as they were are still in the shards: ``nbytes`` bytes of ``__url__``
            from ``offset`` on.

        Raises
        ------
        ArgumentError
            If an image has other channels than the format, or more pixels to an edge; of a lazy
            frame when it is computed.

        Examples
        --------
        >>> frame.images.encode("webp").iloc[0][:4]
        b'RIFF'
        """
        check_choice("format", format, ("jpeg", "png", "webp"))
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

        Pixels are averaged; where all images have one channel, as masks have, the nearest pixel is
        taken. Grey photographs are smoother if you read them with ``size=``.

        Parameters
        ----------
        size, resize
            As for ``read_webdataset_images``: by default the longer edge becomes ``size``.

        Returns
        -------
        dataframe
            The frame with small images in place of its own: ``images.arrays()``, ``stack()`` (after
            ``resize="crop"`` or another that makes them alike), ``encode()`` give them. The pixels
            pass through host memory; a whole dataset is better read with ``size=``.
            With ``resize="shorter"`` an image of which more than 2 GiB would become has none, and
            ``error``, where there is such a column, says so.

        Examples
        --------
        >>> frame.images.thumbnails(64, resize="crop").images.stack().shape
        (51, 64, 64, 3)
        """
        columns = self._columns()
        check_unique(columns, columns)
        return self._map(small_images, columns, self.column, size, resize)

    @abstractmethod
    def channel_stats(self) -> pd.DataFrame | dd.DataFrame:
        """Mean, standard deviation, minimum, maximum and number of pixels of each channel.

        Counted exactly and in one pass, whatever the number of images and partitions; 0 to 255.

        Returns
        -------
        pandas dataframe, one row per channel
            Lazy where the frame is.

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

    def _others(self, columns: Sequence[str] | None, image: str | None) -> list[str]:
        known = self._columns()
        names = known if columns is None else column_names(columns, known)
        check_unique(names, known)
        return [name for name in names if name != image]


def told_shape(height: int | None, width: int | None, channels: int | None) -> str:
    """The shape that images have, as far as it is known."""
    return " × ".join("?" if edge is None else str(edge) for edge in (height, width, channels))


def as_frame(series: Any) -> Any:
    """A frame of one column: the series, of any backend."""
    return series.to_frame("image" if series.name is None else series.name)


def image_column(frame: Any) -> str:
    """The name of a frame's image column; of several the one called ``image``."""
    names = image_columns(frame)
    if names.count("image") == 1:
        return "image"
    if len(names) != 1:
        if names:
            found, advice = (
                f"has the image columns {', '.join(map(repr, names))}",
                f"choose one, .images[{names[0]!r}]",
            )
        elif references := reference_columns(frame):
            listed = ", ".join(map(repr, references))
            found, advice = (
                f"has references, not decoded, in {listed}",
                "decode_images decodes them",
            )
        else:
            found, advice = "has no column of images", "dask_image_ingest.decode_images adds one"
        raise ArgumentError(f"the frame {found}, and .images is of one: {advice}")
    return names[0]
