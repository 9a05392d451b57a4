"""Notes in the file store of deleted batches.

A batch with a note is deleted for good, whatever remains after a kill, and whatever a restored
Redis has of it.
"""

from pathlib import PurePath

from jobs.protocol.results import ApiError
from jobs.store.marker import DELETED_FOLDER
from jobs.store.storage import make_folder, path_of, size_of, touch


def note_of(root: str) -> PurePath:
    """Return the location of the note for the batch in the folder `root`."""
    folder = path_of(root)
    return folder.parents[1] / DELETED_FOLDER / folder.name


def note_deleted(root: str) -> None:
    """Note durably that a batch is deleted. Raise `StoreError`."""
    note = note_of(root)
    make_folder(str(note.parent))
    touch(str(note))


def refuse_deleted(root: str, why: str = "that this request made first was deleted") -> None:
    """Raise `ApiError` 404 for a deleted batch, or `StoreError`.

    The message is "The batch … `why`.".
    """
    if is_deleted(root):
        raise ApiError(404, f"The batch {note_of(root).name} {why}.", param="batch_id")


def is_deleted(root: str) -> bool:
    """Return whether the batch was deleted. Raise `StoreError`."""
    return size_of(str(note_of(root))) is not None
