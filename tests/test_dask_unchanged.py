"""The package adds expressions of its own to Dask's, and leaves Dask as it is."""

from __future__ import annotations

from processes import printed

# Every attribute of the modules and classes of Dask that are loaded, before and after the import.
COMPARES = """
import json, sys
from functools import cached_property
import dask.dataframe, distributed

modules = {
    name: module
    for name, module in sys.modules.items()
    if name.partition(".")[0] in ("dask", "distributed")
}
owners = dict(modules)
for module in modules.values():
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ in modules:
            owners[f"{value.__module__}.{value.__qualname__}"] = value


def attributes():
    return {
        # Cached properties have locks in Python 3.11.
        f"{owner}: {name}": (
            attribute,
            getattr(attribute, "lock", None) if isinstance(attribute, cached_property) else None,
        )
        for owner, value in owners.items()
        for name, attribute in vars(value).items()
        # A module that is loaded becomes an attribute of its package.
        if not isinstance(attribute, type(sys)) and name != "__warningregistry__"
    }


before = attributes()
import dask_image_ingest
after = attributes()
missing = object()
changed = [
    name
    for name in {*before, *after}
    if any(old is not new for old, new in zip(
        before.get(name, (missing, 0)), after.get(name, (missing, 0)), strict=True
    ))
]
print(json.dumps([len(before), sorted(changed)]))
"""


# Dask's own `register_dataframe_accessor` and `register_series_accessor` add the accessors.
ACCESSORS = ["_collection.DataFrame: images", "_collection.Series: images"]


def test_importing_the_package_changes_no_attribute_of_dask_or_distributed():
    compared, changed = printed(COMPARES)
    assert compared > 10_000
    assert changed == [f"dask.dataframe.dask_expr.{name}" for name in ACCESSORS]
