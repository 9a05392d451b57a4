"""vLLM's offline engine, pass by pass: run by vLLM's own interpreter, which has nothing of this
project (see `peers.py`).

Arguments: a model folder, its dtype, the longest context. Each line of stdin is a pass: a list of
prompts as token ids with their number of output tokens, and a JSON schema where the output is to
follow one. Token ids in, token ids out, so that no text is made; the prefix cache is emptied before
each pass.
"""

import json
import sys
import time

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main(model: str, dtype: str, context: str) -> None:
    began = time.perf_counter()
    llm = LLM(model=model, dtype=dtype, max_model_len=int(context), enable_prefix_caching=True)
    answer({"start_up_seconds": round(time.perf_counter() - began, 1)})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": one["prompt_token_ids"]} for one in asked]
        sampling = [sampling_of(one) for one in asked]
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        answer({"seconds": seconds, "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs)})


def sampling_of(asked: dict) -> SamplingParams:
    schema = asked.get("schema")
    return SamplingParams(
        temperature=0,
        ignore_eos=True,
        max_tokens=asked["max_tokens"],
        detokenize=False,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
    )


def answer(value: dict) -> None:
    print("ANSWER " + json.dumps(value), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
