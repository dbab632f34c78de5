"""A file system in memory that asks for a word: its storage option."""

from __future__ import annotations

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


def put_guarded(files: dict[str, bytes]) -> None:
    """Have nothing but these files at ``guarded://``."""
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    fs = MemoryFileSystem()
    fs.store.clear()
    for path, content in files.items():
        fs.pipe(path, content)


class Guarded(MemoryFileSystem):
    """What is in memory, for whoever knows the word."""

    protocol = "guarded"
    cachable = False

    def __init__(self, word=None, **options):
        super().__init__(**options)
        self.word = word

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("guarded://", "memory://"))

    def _check(self):
        if self.word not in ("sesame", "please"):
            raise PermissionError("what is the word?")

    def info(self, path, **options):
        self._check()
        return super().info(path, **options)

    def ls(self, path, **options):
        self._check()
        return super().ls(path, **options)

    def _open(self, path, *args, **options):
        self._check()
        return super()._open(path, *args, **options)
