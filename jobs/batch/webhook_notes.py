"""Notes in the file store of webhooks that are due, one for each end of an API batch.

A note is written before the manifest, or Redis, has the end, so that no kill and no loss of Redis
loses it. If the batch ends differently, the note is dropped.
"""

from typing import NamedTuple

from jobs.batch.manifest import BatchSpec
from jobs.protocol.ids import BATCH, is_id
from jobs.protocol.states import END_STATES
from jobs.queue.request_queue import Queue
from jobs.store.marker import WEBHOOKS_FOLDER
from jobs.store.storage import StoreError, join, list_names, make_folder, path_of, touch


class WebhookNote(NamedTuple):
    """The end of a batch that a webhook is due for."""

    batch: str
    state: str

    @property
    def name(self) -> str:
        """Return the name of the note's file."""
        return f"{self.batch}.{self.state}"


def note_webhook(queue: Queue, batch: str, spec: BatchSpec, state: str) -> None:
    """Store durably that a webhook is due once the batch has ended in this state.

    Does nothing without webhooks, and for batches that did not come through the API. Raise
    `StoreError`.
    """
    if queue.settings.webhook_url is None or not spec.of_api or state not in END_STATES:
        return
    folder = str(path_of(spec.root).parents[1] / WEBHOOKS_FOLDER)
    try:
        make_folder(folder)
        touch(join(folder, WebhookNote(batch, state).name))
    except StoreError as error:
        raise type(error)(
            f"{error}; the batch ends once its webhook is noted there: make {folder} a folder with room that this"
            " process can write to"
        ) from error


def list_webhooks(file_store: str) -> list[WebhookNote]:
    """Return the notes, those of the oldest batches first. Raise `StoreError`."""
    found = (WebhookNote(*name.split(".", 1)) for name in list_names(join(file_store, WEBHOOKS_FOLDER)) if "." in name)
    return [note for note in found if is_id(BATCH, note.batch) and note.state in END_STATES]
