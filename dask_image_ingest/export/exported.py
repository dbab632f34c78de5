"""What an export that is finished tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from dask_image_ingest.export.place import Place
from dask_image_ingest.export.shard import Written

__all__ = ["Exported"]


@dataclass(frozen=True)
class Exported:
    """An export that is finished.

    Attributes
    ----------
    place
        Where it is.
    shards
        What is known of each.
    left_out
        Code of a reason → how many rows were left out for it, the first keys, and a detail.
    damaged
        Source shard → what is wrong with it.
    interleaved
        How many samples had members that lay apart.
    sources
        The shards that the rows point to.
    """

    place: Place
    shards: list[Written]
    left_out: dict[str, Any]
    damaged: dict[str, str]
    interleaved: int
    sources: list[str]

    def frame(self) -> pd.DataFrame:
        """A row for each shard."""
        columns = ["samples", "members", "bytes", "sha256"]
        frame = pd.DataFrame(
            {
                "shard": [written["name"] for written in self.shards],
                "url": [self.place.locate(written["name"]) for written in self.shards],
                **{name: [written[name] for written in self.shards] for name in columns},
            }
        )
        frame.attrs = {
            "left_out": self.left_out,
            "damaged": self.damaged,
            "interleaved": self.interleaved,
        }
        return frame
