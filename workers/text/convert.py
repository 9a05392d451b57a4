"""Convert an older vocabulary to tokenizer.json: `python -m workers.text.convert SOURCE TARGET`.

This runs in a separate process, because transformers' tokenizer classes load torch, which the
worker process never does.
"""

from __future__ import annotations

import sys


def main(source: str, target: str) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        sys.exit(" ".join(str(error).split())[:300])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.get_vocab_size() == 0:
        sys.exit("its tokenizer has no fast form")
    backend.save(target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
