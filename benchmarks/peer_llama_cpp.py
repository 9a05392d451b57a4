"""llama.cpp, one request after the other: run by the interpreter that has llama-cpp-python, and
nothing of this project (see `peers.py`).

Arguments: a GGUF file, the longest context, threads. Each line of stdin is a request: a prompt as
token ids with its number of output tokens. Greedy, by the calls of llama.h itself, so that Python's
part of a token is some microseconds.
"""

import ctypes
import json
import sys
import time

import numpy as np
from llama_cpp import llama_cpp as api

_ERROR = 4  # a level of llama.cpp's log, which lists every tensor otherwise


def main(path: str, context: str, threads: str) -> None:
    began = time.perf_counter()
    api.llama_log_set(log, None)
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = int(context)
    settings.n_threads = settings.n_threads_batch = int(threads)
    settings.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
    running = api.llama_init_from_model(model, settings)
    vocabulary_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    answer({"start_up_seconds": round(time.perf_counter() - began, 1)})
    for line in sys.stdin:
        asked = json.loads(line)
        api.llama_memory_clear(api.llama_get_memory(running), True)
        arrivals, tokens = [time.perf_counter()], asked["prompt_token_ids"]
        output: list[int] = []
        while len(output) < asked["max_tokens"]:
            given = (ctypes.c_int32 * len(tokens))(*tokens)
            if api.llama_decode(running, api.llama_batch_get_one(given, len(tokens))):
                raise RuntimeError("llama_decode failed")
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(running, -1), (vocabulary_size,))
            tokens = [int(logits.argmax())]
            output += tokens
            arrivals.append(time.perf_counter())
        answer({"arrivals": arrivals, "token_ids": output})


@api.llama_log_callback
def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode())


def answer(value: dict) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
