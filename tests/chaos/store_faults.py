"""What a fleet that has nothing to do any more may have in its bucket."""

import re
from collections.abc import Sequence

from tests.chaos.load import SubmittedBatch
from tests.support.object_stores import files_below

_STAYS = re.compile(
    r"""store_id | owner | idempotency/[0-9a-f]{64} | files/[^/]+/(record\.json|content[^/]*)
    | \.check-[0-9a-f]+  # of a start that was killed
    | batches/[^/]+/(manifest\.json|cancelled|input[^/]*|log/[^/]+|made-[^/]+/lines\.(index|jsonl))""",
    re.VERBOSE,
)


def store_faults(file_store: str, batches: Sequence[SubmittedBatch]) -> list[str]:
    """Return sentences about what an ended batch needs no more, such as its parts and its plan, and
    about unknown objects.

    Who writes into the folder of a batch that is gone may leave something: it goes after a day.
    """
    lost = tuple(f"batches/{batch.id}/" for batch in batches if batch.lost)
    found = (name for name in files_below(file_store) if not name.startswith(lost))
    return [f"left in the bucket: {name}" for name in found if not _STAYS.fullmatch(name)]
