"""What is kept in a folder of this machine."""

import os

from dask_image_ingest.export.local_place import LocalPlace


def test_a_file_that_is_cut_off_while_it_is_read_ends_no_process(tmp_path):
    path = tmp_path / "part"
    path.write_bytes(bytes(1 << 20))
    with LocalPlace(str(tmp_path)).open("part") as file:
        assert file.size() == 1 << 20
        os.truncate(path, 10)
        file.seek(1 << 19)
        assert file.read() == b""
