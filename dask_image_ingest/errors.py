"""What can go wrong, one class for each thing that a caller may want to catch.

Every class also derives from the built-in exception that plain Python would raise, so that ``except
FileNotFoundError`` keeps working. Each takes one finished sentence and nothing else: workers send
their exceptions to the client by pickle, which keeps a message as it is.
"""

__all__ = [
    "ArgumentError",
    "DaskImageIngestError",
    "ExportError",
    "FunctionError",
    "ImageDecodeError",
    "MissingDependencyError",
    "OperandError",
    "PartitionTooLargeError",
    "ShardError",
    "ShardNotFoundError",
]


class DaskImageIngestError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(DaskImageIngestError, ValueError):
    """An argument makes no sense, alone or together with another one."""


class OperandError(ArgumentError, TypeError):
    """An operation that a column of images or lists does not have; pandas goes by TypeError."""


class MissingDependencyError(DaskImageIngestError, ImportError):
    """An optional package is needed for this and is not installed."""


class ShardNotFoundError(DaskImageIngestError, FileNotFoundError):
    """A path, a pattern or a folder leads to no shard."""


class ShardError(DaskImageIngestError, ValueError):
    """A shard cannot be read, or is no tar archive."""


class ImageDecodeError(DaskImageIngestError, ValueError):
    """An image cannot be decoded and the reader was told to raise (``errors="raise"``)."""


class FunctionError(DaskImageIngestError, RuntimeError):
    """A function that was passed in has failed: a transform, or that of ``map_batches``."""


class ExportError(DaskImageIngestError, OSError):
    """Shards cannot be written where they should go, or not over what is there already."""


# MemoryError comes first because it makes its instances by itself: the other way round, the
# exception cannot be rebuilt from what a Dask worker sends.
class PartitionTooLargeError(MemoryError, DaskImageIngestError):
    """The images of one partition decode to more bytes than a partition may hold."""
