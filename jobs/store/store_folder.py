"""The location of the file store."""

from pathlib import PurePath

from jobs.store.storage import StoreError, is_missing, join, path_of, read_bytes

_SCHEMA_FILE, _SCHEMA = "schema", "1"


def store_root(location: str) -> PurePath:
    """Return the root of the file store at FILE_STORE.

    Raise `StoreError` unless its schema is this version's; a store without a schema file has this
    version's.
    """
    try:
        schema = read_bytes(join(location, _SCHEMA_FILE)).decode(errors="replace").strip()
    except StoreError as error:
        if not is_missing(error):
            raise
        schema = _SCHEMA
    if schema != _SCHEMA:
        raise StoreError(
            f"the file store {location} has schema {schema}, and this version reads schema {_SCHEMA}: run the version"
            " that wrote it, or use another folder"
        )
    return path_of(location)
