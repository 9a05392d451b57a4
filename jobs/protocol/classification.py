"""`/v1/classify`, in vLLM's shapes."""

from collections.abc import Sequence
from typing import Any

from jobs.protocol.pooling_endpoint import PooledOutput, PoolingCall, PoolingEndpoint, PoolingHead
from jobs.protocol.pooling_parameters import CLASSIFY


class ClassifyEndpoint(PoolingEndpoint):
    """Texts in, the probability of each class out."""

    url = CLASSIFY
    tasks = ("classify", "score")
    prompt_field = "input"
    id_prefix = "classify-"

    def body(self, call: PoolingCall, head: PoolingHead, outputs: Sequence[PooledOutput]) -> dict[str, Any]:
        data = [self._classified(i, output.numbers(), head.labels) for i, output in enumerate(outputs)]
        named = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
        return {**named, "data": data, "usage": head.usage}

    def _classified(self, index: int, numbers: list[float], labels: Sequence[str]) -> dict[str, Any]:
        likeliest = max(range(len(numbers)), key=numbers.__getitem__)
        label = labels[likeliest] if likeliest < len(labels) else None
        return {"index": index, "label": label, "probs": numbers, "num_classes": len(numbers)}
