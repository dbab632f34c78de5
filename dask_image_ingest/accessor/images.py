"""The methods of ``.images`` that eager and lazy frames share."""

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

    from dask_image_ingest.loader.dataloader import BatchLoader

# Return types of the methods: Dask's for lazy frames, those of pandas or cuDF for eager ones.
Frame = TypeVar("Frame")
Series = TypeVar("Series")


class Images(ABC, Generic[Frame, Series]):
    """The methods of ``.images``; those of eager frames compute at once."""

    def __init__(self, frame: Any) -> None:
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

    def _shape(self, image: str) -> str | None:
        """The shape of the images in words, as far as it is known without computing."""
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
        facts = [f"images in column {image!r}", *self._facts(image), f"columns {columns}"]
        return f"<{'; '.join(facts)}>"

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
        """A column of lists, such as embeddings, as one array.

        Parameters
        ----------
        column
            A column of lists of equal length, as from :meth:`map_batches`.

        Returns
        -------
        array, shape (n, length)
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
        outputs: Mapping[str, Any],
        *,
        inputs: Sequence[str] | None = None,
        batch_size: int = 256,
        keep_image: bool = False,
        skip_missing: bool = True,
    ) -> Frame:
        """Call a function or a model with batches of images; add its results as columns.

        Image columns are dropped, unless ``keep_image=True``. To read fewer other columns, choose
        them afterwards: ``ddf.images.map_batches(...)[["__key__", "score"]]``.

        Parameters
        ----------
        fn
            Called with each batch: an array (n, height, width, channels) of uint8, NumPy or CuPy,
            or a list of arrays if shapes differ. These are copies, which it may change. It returns
            an array (or a tensor, or a list of strings) with a value for each image, or a dict of
            such. A batch never spans partitions. A class, or a ``functools.partial`` of one, is
            instantiated once in each worker process, and the instance is called with the batches:
            load models in its constructor. A process keeps the eight instances used last.
        outputs
            The new columns and their types: ``"float32"``, ``"int64"``, ``"bool"``, ``"string"``,
            ``"binary"``; ``"list<float32>"`` if ``fn`` returns (n, d); ``"image"`` if it returns an
            array (n, height, width, channels) of uint8, or a list of arrays. A lazy frame needs its
            types before anything is computed. An output replaces a column of its name.
        inputs
            The columns to pass to ``fn``, each as one argument, in this order; by default the image
            column alone. Numbers are passed as an array (n,), null floats as NaN. Lists are passed
            as a list of arrays; lists of vectors of one length as arrays (k, d). Strings and
            anything else are passed as a list of Python values. Null is None in lists. Only these
            columns and those that are kept are read: if no image column is among them, no image is
            decoded, and the frame need not have one.
        batch_size
            Rows in a batch, at most.
        keep_image
            Whether to keep the image columns.
        skip_missing
            Whether to skip rows without an image in one of the ``inputs``: their outputs are null.
            Otherwise ``fn`` gets None in place of the image, in a list.

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
            be exact, floats are rounded. When computed, if integers or booleans of an input are
            null.
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

        Images as output:

        >>> mirrored = ddf.images.map_batches(lambda images: images[:, :, ::-1], {"image": "image"})
        >>> mirrored.head(1).images.arrays()[0].shape
        (224, 224, 3)

        Images with their captions:

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
        existing, images = self._columns(), image_columns(self._meta())
        kept = [name for name in existing if keep_image or name not in images]
        default = [self.column] if inputs is None else inputs
        arguments = column_names(default, existing, "inputs")
        check_unique([*kept, *arguments], existing)
        if not arguments:
            raise ArgumentError("inputs=[]: name at least one column that the function gets")
        return self._map_batches(
            make_batch_map(fn, outputs, batch_size, arguments, skip_missing, kept)
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
            Images in a batch. Batches may span partitions; the last one may be smaller.
        format
            ``"numpy"``, ``"cupy"`` or ``"torch"``. Arrays and tensors share the partition's memory
            on its device, without a copy, except images made by ``normalize``: don't write to them,
            or a persisted frame changes.
        columns
            The other columns of a batch; all by default. Only these are read.
        shuffle
            A seed: partitions come in random order, and their rows are mixed in a buffer. Take
            another seed for each epoch.
        shuffle_buffer
            How many rows to mix: the partitions that have as many together, or one that has more.
            Or how many bytes of pixels to hold, such as ``"2 GiB"``, of up to 16 partitions; by
            default ``"1 GiB"``. If the images of local files would need more, references to them
            are mixed instead, and decoded afterwards; elsewhere fewer partitions are mixed, at
            least two. The order depends on the seed and on this, not on ``batch_size`` and
            ``prefetch``.
        drop_last
            Drop the last batch if it is smaller.
        prefetch
            Partitions to read ahead while one is used: on the workers if there is a ``distributed``
            client, else on a thread. So at most ``prefetch + 1`` partitions are in memory, and
            those in the buffer of a shuffle, whatever the size of the frame. If a shuffle mixes
            references, pieces of up to 1,024 rows and 16 MiB of files count instead of partitions.
            By default 1; on a cluster two more than its workers have threads, at most 10; of cuDF
            two, which take memory of this process's GPU.
        start
            Where to begin. A number of batches to skip, which are decoded to find the position. Or
            the ``position`` of an earlier iterator: nothing before it is read, except, with a
            shuffle, the partitions in its buffer. The batches are those of an uninterrupted
            iteration if the rows come in the same order again, as those of a read and of a shuffle
            of its references do; Dask's merges, and its sorts with equal keys, may change it.
        shard
            (rank, world): read only every world-th partition, beginning with number rank, so that
            all processes together read each image once. A shuffle orders the partitions before they
            are divided. By default taken from torch: workers of a ``DataLoader`` share, and with
            ``format="torch"`` also the ranks of ``torch.distributed``. None for the whole frame.
        normalize
            (mean, std) of values from 0 to 1, each a number or one for each channel: images are
            float32 with channels first, (value / 255 - mean) / std, made in one pass. All must have
            one shape.

        Returns
        -------
        Batches
            An iterator of dicts. Each has the image column: an array (n, height, width, channels)
            of uint8, or a list of arrays if shapes differ, or with ``normalize`` an array (n,
            channels, height, width) of float32. And the other columns: arrays (n,); of lists (n,
            d); of strings NumPy arrays of objects, for torch lists. Rows without an image are left
            out. Its attribute ``position`` says where the next batch begins. A new loop over a
            finished iterator starts again, with the same batches.

        Raises
        ------
        ArgumentError
            If a column has nulls, so that it cannot be an array.
        MissingDependencyError
            If ``format`` needs CuPy or torch, and it is not installed.

        Notes
        -----
        Each partition is computed separately. After a shuffle, a merge or a sort, where each
        partition needs all those of the input, ``persist()`` the frame first.

        Examples
        --------
        >>> half = (0.5, 0.5)
        >>> for batch in ddf.images.iter_batches(32, columns=["cls"], shuffle=0, normalize=half):
        ...     loss = train_step(batch["image"], batch["cls"])
        """
        image = self.column
        check_choice("format", format, FORMATS)
        names = [image, *self._other_columns(columns, image)]
        if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
            raise ArgumentError(
                f"iter_batches: {', '.join(map(repr, repeated))} would be in a batch twice: name "
                "each column once in columns="
            )
        rank, world = parse_shard(shard, format)
        return Batches(
            self._source(names, image, world),
            self._meta()[names],
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
        """A torch ``DataLoader`` of batches of tensors, whose workers share the partitions.

        Use it on a CPU, where worker processes decode while the model runs. On a GPU, or with a
        cluster, :meth:`iter_batches` itself reads ahead: on the GPU of this process, or by mapping
        pixels that CPU workers on this machine decode. Pixels that workers with GPUs decode are
        sent to this process.

        Parameters
        ----------
        batch_size, columns, shuffle, shuffle_buffer, drop_last, prefetch, normalize
            As for :meth:`iter_batches`, for each worker and rank separately: the last batch of each
            may be smaller.
        **options
            Further arguments of ``DataLoader``: ``num_workers=4``, ``persistent_workers=True``,
            ``pin_memory=True``, ``multiprocessing_context="spawn"``.

        Returns
        -------
        torch.utils.data.DataLoader
            All workers, and all ranks if ``torch.distributed`` runs, together yield each image
            once; ranks may have different numbers of batches. Its ``dataset`` is an
            ``IterableDataset`` of batches: ``loader.dataset.set_epoch(epoch)`` changes the order of
            a shuffle, with ``persistent_workers=True`` too. The dataset's ``state_dict`` and
            ``load_state_dict`` let torchdata's ``StatefulDataLoader(loader.dataset,
            batch_size=None)`` resume.

        Raises
        ------
        ArgumentError
            As :meth:`iter_batches`, and for options that such a ``DataLoader`` refuses.
        MissingDependencyError
            If torch is not installed.

        Notes
        -----
        Workers share partitions: if there are fewer of them than workers, some workers have none.
        The workers compute locally, not on a cluster: pass the frame as it was before
        ``persist()``.

        Examples
        --------
        >>> import torch
        >>> loader = ddf.images.dataloader(16, columns=["cls"], shuffle=0, num_workers=2)
        >>> sum(len(batch["cls"]) for batch in loader)
        51
        """
        from dask_image_ingest.loader.dataloader import make_dataloader

        batches = {
            "batch_size": batch_size,
            "columns": columns,
            "shuffle": shuffle,
            "shuffle_buffer": shuffle_buffer,
            "drop_last": drop_last,
            "prefetch": prefetch,
            "normalize": normalize,
        }
        return make_dataloader(self._frame, batches, options)

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
            that would take more than 2 GiB becomes null, and the column ``error``, if there is one,
            says so.

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

    def _other_columns(self, columns: Sequence[str] | None, image: str | None) -> list[str]:
        existing = self._columns()
        names = existing if columns is None else column_names(columns, existing)
        check_unique(names, existing)
        return [name for name in names if name != image]


def shape_text(height: int | None, width: int | None, channels: int | None) -> str:
    """A shape in words, with "?" for unknown edges."""
    return " × ".join("?" if edge is None else str(edge) for edge in (height, width, channels))


def as_frame(series: Any) -> Any:
    """The series, of any backend, as a frame of one column."""
    return series.to_frame("image" if series.name is None else series.name)


def image_column(frame: Any) -> str:
    """The name of a frame's image column; of several, the one called ``image``."""
    names = image_columns(frame)
    if names.count("image") == 1:
        return "image"
    if len(names) != 1:
        if names:
            problem, advice = (
                f"has the image columns {', '.join(map(repr, names))}",
                f"choose one, .images[{names[0]!r}]",
            )
        elif references := reference_columns(frame):
            listed = ", ".join(map(repr, references))
            problem, advice = (
                f"has references, not decoded, in {listed}",
                "decode_images decodes them",
            )
        else:
            problem, advice = "has no column of images", "dask_image_ingest.decode_images adds one"
        raise ArgumentError(f"the frame {problem}, and .images is of one: {advice}")
    return names[0]
