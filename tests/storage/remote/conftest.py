"""A bucket of a real S3 server."""

import pytest
import s3

BUCKET = "shards"


@pytest.fixture
def s3_options(s3_server):
    return s3.s3_options(s3_server)


@pytest.fixture
def bucket(s3_server):
    return s3.empty_bucket(s3_server, BUCKET), BUCKET
