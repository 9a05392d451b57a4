"""Results as a folder of Parquet files, by the values of some columns (hive partitioning)."""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.batch.tables import open_table
from jobs.control.result_rows import kept_name
from jobs.store.input_formats import PARQUET
from jobs.store.storage import sha256_of, sync_folder
from pipeline.errors import Refused
from pipeline.uris.opened import GROUP_ROWS
from pipeline.uris.stores import OBJECT_STORES, filesystem_of, infos_below
from pipeline.uris.uri import Uri

SUCCESS = "_SUCCESS"
"""Name of an empty file that is written last; readers of datasets ignore it."""

_MOST_PARTITIONS = 1 << 16
_MOST_OPEN_FILES = 64


def check_empty(uri: Uri) -> None:
    """Raise `Refused` if the folder is not empty, and `Unfinished`."""
    if found := infos_below(uri):
        raise Refused(f"the output {uri} has files already, such as {found[0].base_name}: name another folder")


def check_types(path: Path, kept: Sequence[str], columns: Sequence[str]) -> None:
    """Raise `Refused` if values of a kept Parquet column cannot be folder names."""
    from pyarrow import types

    schema = open_table(str(path), PARQUET).schema
    for name in kept:
        if kept_name(name) in columns and types.is_nested(schema.field(name).type):
            raise Refused(f"--partition-by names a column of lists, structs or maps: {kept_name(name)}")


def write_partitions(uri: Uri, path: str, columns: Sequence[str]) -> None:
    """Write the rows of a Parquet file into the folder, and then `SUCCESS`.

    Files of an earlier, incomplete start are replaced; their names contain a digest of the
    results. Raise `Refused` if there are other files.
    """
    import pyarrow
    from pyarrow import dataset

    filesystem, inside = filesystem_of(uri)
    has_folders = filesystem.type_name not in OBJECT_STORES
    if has_folders:
        filesystem.create_dir(inside, recursive=True)
    own = f"part-{sha256_of(path)[:12]}-"
    _check_own(uri, own)
    if filesystem.get_file_info(f"{inside}/{SUCCESS}").is_file:
        filesystem.delete_file(f"{inside}/{SUCCESS}")
    _remove_below(uri, filesystem, own)
    rows = dataset.dataset(path, format="parquet")
    with _failures_of_values(uri, columns):
        dataset.write_dataset(
            rows.scanner(batch_size=GROUP_ROWS, batch_readahead=1, use_threads=False),
            inside,
            filesystem=filesystem,
            format="parquet",
            basename_template=own + "{i}.parquet",
            partitioning=dataset.partitioning(
                pyarrow.schema([rows.schema.field(name) for name in columns]), flavor="hive"
            ),
            create_dir=has_folders,
            existing_data_behavior="overwrite_or_ignore",
            max_partitions=_MOST_PARTITIONS,
            max_open_files=_MOST_OPEN_FILES,
            use_threads=False,
        )
    if filesystem.type_name == "local":
        _sync(Path(inside))
    try:
        _check_own(uri, own)
    except Refused:
        _remove_below(uri, filesystem, own)
        raise
    filesystem.open_output_stream(f"{inside}/{SUCCESS}").close()


@contextlib.contextmanager
def _failures_of_values(uri: Uri, columns: Sequence[str]) -> Iterator[None]:
    import pyarrow

    where = f"{uri} cannot be written by the values of {', '.join(columns)}"
    again = "name other columns with --partition-by"
    try:
        yield
    except pyarrow.ArrowInvalid as error:
        if "exceeds the maximum" not in str(error):
            raise
        raise Refused(f"{where}, since there are more than {_MOST_PARTITIONS:,} of them: {again}") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG and "KeyTooLong" not in str(error):
            raise
        raise Refused(f"{where}, since some are too long for a file name: {again}") from None


def _check_own(uri: Uri, own: str) -> None:
    if others := [info.base_name for info in infos_below(uri) if not info.base_name.startswith(own)]:
        raise Refused(f"the output {uri} has files of another run, such as {others[0]}: name another folder")


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        elif path.suffix == ".parquet":
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _remove_below(uri: Uri, filesystem: Any, own: str) -> None:
    for info in infos_below(uri):
        if info.base_name.startswith(own):
            filesystem.delete_file(info.path)
