"""Results as a folder of Parquet files, by the values of some columns (hive partitioning)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.store.storage import sha256_of, sync_folder
from pipeline.errors import Refused
from pipeline.uris.stores import OBJECT_STORES, filesystem_of, infos_below
from pipeline.uris.uri import Uri

SUCCESS = "_SUCCESS"
"""The name of an empty file that is written last, and that readers of datasets pass over."""

_ROWS = 1 << 13
_MOST_PARTITIONS = 1 << 16
_MOST_OPEN_FILES = 64


def check_empty(uri: Uri) -> None:
    """Raise `Refused` if something is in the folder, and `Unfinished`."""
    if found := infos_below(uri):
        raise Refused(f"the output {uri} has files already, such as {found[0].base_name}: name another folder")


def write_partitions(uri: Uri, path: str, columns: Sequence[str]) -> None:
    """Write the rows of a Parquet file into the folder, and then `SUCCESS`.

    Files of an earlier start that came less far are replaced. Their names hold a digest of the
    results. Raise `Refused` where others are there.
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
    dataset.write_dataset(
        rows.scanner(batch_size=_ROWS, batch_readahead=1, use_threads=False),
        inside,
        filesystem=filesystem,
        format="parquet",
        basename_template=own + "{i}.parquet",
        partitioning=dataset.partitioning(pyarrow.schema([rows.schema.field(name) for name in columns]), flavor="hive"),
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
