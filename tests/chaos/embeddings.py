"""Texts whose embeddings are known."""

import json
import random
from functools import partial
from itertools import product
from pathlib import Path

import torch

from tests.chaos.questions import AskedQuestion
from tests.support.pooling_models import embedding, save_embedder
from tests.support.small_tokenizers import bert

MODEL = "embed"
MOST_TEXTS = 4  # of a line
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "add", "family")


class EmbeddedTexts:
    """An endless supply; the model is written to `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        model = save_embedder(folder)
        texts = map(" ".join, product(_WORDS, repeat=2))
        self._vectors = {text: embedding(model, bert().encode(text).ids) for text in texts}

    def draw(self, rng: random.Random) -> AskedQuestion:
        """One line of a few texts."""
        texts = rng.sample(list(self._vectors), rng.randint(1, MOST_TEXTS))
        body = {"model": MODEL, "input": texts}
        return AskedQuestion(texts[0].replace(" ", "-"), body, partial(self._fits, texts), url="/v1/embeddings")

    def _fits(self, texts: list[str], answer: str) -> bool:
        given, expected = torch.tensor(json.loads(answer)), torch.stack([self._vectors[text] for text in texts])
        return given.shape == expected.shape and torch.allclose(given, expected, atol=1e-5)
