"""A model with random weights that follows schemas: what it ends, meets them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers

from tests.support.grammars import of_schema
from tests.support.json_schemas import SchemaMaker
from tests.workers.engine.driving import run
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, OutputGuide, SamplingParams
from workers.grammars.compiler import compile_format
from workers.settings import DEMO_MODEL
from workers.text.errors import FormatError
from workers.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer.load(DEMO_MODEL)
TOKENS = TOKENIZER.vocabulary()
LONGEST = 1000


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = tmp_path_factory.mktemp("random")
    save_model(folder)
    config = EngineConfig(
        model=str(folder), device="cpu", threads=1, dtype="float32", max_num_seqs=64, kv_cache_memory_bytes=1 << 28
    )
    core = EngineCore(Executor(config))
    core.set_vocabulary(TOKENS)
    return core


def save_model(folder: Path) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST + 24,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def request_for(number: int, grammar: str) -> EngineRequest:
    """A request whose answer likes to end."""
    end = TOKENIZER.eos_token_id
    assert end is not None
    sampling = SamplingParams(LONGEST, seed=number, logit_bias=((end, 10.0),))
    return EngineRequest(number, [number % len(TOKENS), 7], [], sampling, guide=OutputGuide(grammar))


@pytest.mark.proof
@pytest.mark.parametrize(("count", "least"), [(20, 14), (250, 225)])
def test_what_a_random_model_ends_meets_its_schema(core: EngineCore, count: int, least: int) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    maker, vocabulary = SchemaMaker(random.Random(seed)), Vocabulary(TOKENS, len(TOKENS))
    schemas: dict[int, dict[str, Any]] = dict(enumerate(maker.make() for _ in range(count)))
    requests: list[EngineRequest] = []
    for number, schema in schemas.items():
        try:
            requests.append(request_for(number, compile_format(of_schema(schema), vocabulary)))
        except FormatError as error:
            print(error, schema)
    finished = 0
    for number, answer in run(core, requests).answers.items():
        assert not answer.error, answer.error
        if answer.finish is Finish.STOP:
            finished += 1
            text = b"".join(TOKENS[token] for token in answer.tokens)
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            validator = jsonschema.Draft202012Validator(schemas[number], format_checker=checker)
            validator.validate(json.loads(text))
    print(f"{finished} of {count} ended")
    assert finished >= least
