"""The pandas backend keeps the contract that every backend keeps."""

import pandas as pd
import pytest
from contract import BackendContract

from dask_image_ingest.frames import get_backend


class TestPandas(BackendContract):
    @pytest.fixture
    def backend(self):
        return get_backend("pandas")

    def read_parquet(self, path):
        return pd.read_parquet(path, dtype_backend="pyarrow")
