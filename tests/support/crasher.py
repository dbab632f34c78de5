"""A decoder bug that nobody knows yet: one image that kills whichever process decodes it.

Planted from outside, by a ``sitecustomize`` that every new Python of a test finds on its path, and
that forks load: the package holds nothing for it.
"""

from __future__ import annotations

import os
from pathlib import Path

#: The bytes that kill, anywhere in an image, by the decoder that has the bug.
IN_DALI, IN_PILLOW = b"this one kills DALI", b"this one kills Pillow"

_SITECUSTOMIZE = f"""
import importlib.abc
import importlib.machinery
import os
import signal
import sys


def die(*_):
    os.kill(os.getpid(), signal.SIGSEGV)


def plant_in_dali(module):
    as_input = module.DaliDecoder._as_input

    def bug(self, batch):
        if any({IN_DALI!r} in bytes(memoryview(image)) for image in batch):
            die()
        return as_input(self, batch)

    module.DaliDecoder._as_input = bug


def plant_in_pillow(module):
    pixels_of = module.decode_with_pillow

    def bug(data, *options):
        if {IN_PILLOW!r} in bytes(data[:]):
            die()
        return pixels_of(data, *options)

    module.decode_with_pillow = bug


PLANTS = {{
    "dask_image_ingest.decode.dali": plant_in_dali,
    "dask_image_ingest.decode.pillow": plant_in_pillow,
}}


class Planter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in PLANTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_plant(module):
            load(module)
            PLANTS[name](module)

        spec.loader.exec_module = load_and_plant
        return spec


sys.meta_path.insert(0, Planter())
for name, plant in PLANTS.items():
    if name in sys.modules:
        plant(sys.modules[name])
# Of Pythons that this one starts.
path = os.path.dirname(__file__), *os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
"""


def plant(folder: Path) -> dict[str, str]:
    """The environment of processes whose decoders have the bug; ``folder`` holds it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        # A crash is what is asked for: no report of it.
        "PYTHONFAULTHANDLER": "",
    }
