"""The defaults of models as the registry has them."""

from jobs.protocol.default_parameters import DefaultParameters
from jobs.queue.request_queue import Queue


def read_defaults(queue: Queue) -> dict[str, DefaultParameters]:
    """Return the known defaults of each model that is, was or will soon be served.

    A model that is served has those of its newest worker.
    """
    found = {model.name: model.defaults for model in queue.models()}
    found |= {name: offer.defaults for name, offer in queue.on_demand().items() if offer.defaults is not None}
    for worker in queue.workers():
        if worker.defaults is not None:
            found |= dict.fromkeys(worker.models, worker.defaults)
    return found
