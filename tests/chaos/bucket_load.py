"""Work of a fleet whose file store is in a bucket: its batches come through the API, by the
official client.
"""

from random import Random

import openai

from jobs.store.storage import clear_folder
from tests.chaos.load import ChaosLoad, SubmittedBatch

_PASSING = (409, 503)
"""Statuses of calls that are to be made again: another call has the key, or something is away."""
_CALL_SECONDS = 60.0


class BucketLoad(ChaosLoad):
    """Each call that makes something has a key of its own, so that it may be repeated however it
    ended.
    """

    refusals = (*ChaosLoad.refusals, "keys_unavailable")
    padding = 3000 * " "
    """Objects of more than 8 MiB come in parts."""

    def lose_folder(self, rng: Random) -> str | None:
        """Remove the objects of a batch under way, its manifest first; None if there is none. Raise
        `StoreError`.
        """
        running = [one for one in self.batches if one.record is not None and not one.record.ended and not one.lost]
        if not running:
            return None
        batch = rng.choice(running)
        batch.lost = True
        assert batch.id is not None
        clear_folder(f"{self._fleet.file_store}/batches/{batch.id}", "manifest.json")
        return batch.source.parent.name

    def _submit(self, batch: SubmittedBatch) -> str | None:
        name = batch.source.parent.name
        question = next(iter(batch.questions.values()))
        try:
            with self._client() as client:
                file = client.files.create(file=batch.source, purpose="batch", extra_headers=_key(f"file of {name}"))
                made = client.batches.create(
                    input_file_id=file.id,
                    endpoint=question.url,  # type: ignore[arg-type]
                    completion_window="24h",
                    extra_headers=_key(name),
                )
        except openai.APIError as error:
            self._note_refusal(f"a call that makes {name}", error)
            return None
        return made.id

    def _cancel(self, batch_id: str) -> None:
        try:
            with self._client() as client:
                client.batches.cancel(batch_id)
        except openai.APIError as error:
            self._note_refusal(f"a call that cancels {batch_id}", error)  # 409: it has ended

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self._fleet.api_url}/v1", api_key="none", max_retries=0, timeout=_CALL_SECONDS)

    def _note_refusal(self, what: str, error: openai.APIError) -> None:
        """A call may be cut off, or refused for now."""
        passing = isinstance(error, openai.APIConnectionError) or getattr(error, "status_code", 0) in _PASSING
        if not passing:
            self.faults.append(f"{what} ended with {type(error).__name__}: {str(error)[:300]}")


def _key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name}
