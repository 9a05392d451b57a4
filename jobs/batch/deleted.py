"""Notes in the file store of batches that were deleted.

What is noted is gone for good, whatever a kill has left of it, and whatever a Redis that went back
knows of it.
"""

from pathlib import PurePath

from jobs.protocol.results import ApiError
from jobs.store.marker import DELETED_FOLDER
from jobs.store.storage import make_folder, path_of, size_of, touch


def note_of(root: str) -> PurePath:
    """Return where the deletion of the batch in the folder `root` is noted."""
    folder = path_of(root)
    return folder.parents[1] / DELETED_FOLDER / folder.name


def note_deleted(root: str) -> None:
    """Note durably that a batch is deleted. Raise `StoreError`."""
    note = note_of(root)
    make_folder(str(note.parent))
    touch(str(note))


def refuse_deleted(root: str, why: str = "that this request made first was deleted") -> None:
    """Raise `ApiError` 404 for a batch that was deleted, with the sentence "The batch … `why`.", or
    `StoreError`.
    """
    if is_deleted(root):
        raise ApiError(404, f"The batch {note_of(root).name} {why}.", param="batch_id")


def is_deleted(root: str) -> bool:
    """Return whether the batch was deleted. Raise `StoreError`."""
    return size_of(str(note_of(root))) is not None
