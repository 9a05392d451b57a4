"""sentence-transformers as a whole process: run by its own interpreter, which has nothing of this
project.

Arguments: a model folder, its dtype, how many texts run at once, "embed" or "score", a file with a
JSON text (or pair of texts) in each line, and the file for the results, one JSON line each.
"""

import json
import sys

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer


def main(model: str, dtype: str, batch_size: str, task: str, source: str, results: str) -> None:
    with open(source) as file:
        given = [json.loads(line) for line in file]
    run = {"batch_size": int(batch_size), "show_progress_bar": False}
    options = {"device": "cpu", "model_kwargs": {"dtype": getattr(torch, dtype)}}
    if task == "embed":
        found = SentenceTransformer(model, **options).encode(given, **run)
    else:
        found = CrossEncoder(model, **options).predict(given, **run)
    with open(results, "w") as file:
        for one in found.tolist():
            file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
