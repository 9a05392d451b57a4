"""The defaults of models as the registry has them."""

from collections.abc import Iterable, Mapping

from jobs.protocol.default_parameters import DefaultParameters
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import ModelRecord, WorkerRecord
from jobs.queue.request_queue import Queue


def read_defaults(queue: Queue) -> dict[str, DefaultParameters]:
    """Return the known defaults of each model that is, was or will soon be served."""
    return newest_defaults(queue.models(), queue.on_demand(), queue.workers())


def newest_defaults(
    models: Iterable[ModelRecord], offers: Mapping[str, OnDemandModel], workers: Iterable[WorkerRecord]
) -> dict[str, DefaultParameters]:
    """Return the known defaults of each model: of its newest worker, if there is one.

    `workers` are sorted by age, oldest first.
    """
    found = {model.name: model.defaults for model in models}
    found |= {name: offer.defaults for name, offer in offers.items() if offer.defaults is not None}
    for worker in workers:
        if worker.defaults is not None:
            found |= dict.fromkeys(worker.models, worker.defaults)
    return found
