"""``python -m dask_image_ingest.cli``."""

import sys

from dask_image_ingest.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
