"""Small random models of every family, with transformers' answers to compare with.

Weights are drawn wide enough that 64 greedy tokens hold at least 20 distinct ones; a narrow draw
repeats one token and would hide errors. Seeds are chosen so that no greedy token is a near tie (the
least top-1 margin of each is over 1e-3).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

# Models this small run slower on several threads, and many times slower where those have to share
# their processors.
torch.set_num_threads(1)

VOCAB = 160
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 150, 3, 97, 17, 40)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
    "short_factor": [1.0 + i / 16 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)],
}
_GEMMA4: dict[str, Any] = _SHAPE | {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "tie_word_embeddings": False,
}
_MULTIPLIERS = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 0.5,
}
_NEOX = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}


@dataclass(frozen=True)
class TinyModel:
    """How to make one model: transformers' configuration class and what to set in it."""

    seed: int
    width: float  # standard deviation of the projections
    config_class: str
    settings: dict[str, Any]
    auto_class: str = "AutoModelForCausalLM"
    embedding: float = 0.05  # standard deviation


MODELS = {
    "cohere": TinyModel(
        2,
        0.15,
        "CohereConfig",
        _SHAPE | {"use_qk_norm": True, "logit_scale": 1.5, "tie_word_embeddings": False, "intermediate_size": 192},
        embedding=0.2,
    ),
    "cohere-biased": TinyModel(
        1, 0.22, "CohereConfig", _SHAPE | {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 1.5}
    ),
    "cohere2": TinyModel(
        3,
        0.22,
        "Cohere2Config",
        _SHAPE | {"sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 1.0, "tie_word_embeddings": False},
    ),
    "exaone4": TinyModel(
        6, 0.22, "Exaone4Config", _SHAPE | {"sliding_window": 24, "sliding_window_pattern": 2, "head_dim": 32}
    ),
    "exaone4-full": TinyModel(
        4,
        0.22,
        "Exaone4Config",
        _SHAPE | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        embedding=1.0,
    ),
    "gemma": TinyModel(1, 0.22, "GemmaConfig", _SHAPE | {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma2": TinyModel(
        1,
        0.22,
        "Gemma2Config",
        _SHAPE
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
        },
        embedding=0.5,
    ),
    "gemma3": TinyModel(
        2,
        0.22,
        "Gemma3TextConfig",
        _SHAPE
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
            },
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": TinyModel(
        1,
        0.22,
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 8.0,
        },
        embedding=0.5,
    ),
    "gemma4-keys-as-values": TinyModel(
        2,
        0.22,
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
        embedding=0.5,
    ),
    "gemma4-unified": TinyModel(3, 0.22, "Gemma4UnifiedTextConfig", _GEMMA4, embedding=0.5),
    "gpt2": TinyModel(1, 0.3, "GPT2Config", _GPT2_SHAPE),
    "gpt2-by-layer": TinyModel(
        2,
        0.3,
        "GPT2Config",
        _GPT2_SHAPE | {"n_inner": 80, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
    "llama": TinyModel(2, 0.22, "LlamaConfig", _SHAPE),
    "llama-biased": TinyModel(
        22, 0.3, "LlamaConfig", _SHAPE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "ministral": TinyModel(
        2,
        0.22,
        "MinistralConfig",
        _SHAPE
        | {
            "sliding_window": 24,
            "head_dim": 32,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "ministral3": TinyModel(
        1,
        0.22,
        "Ministral3Config",
        _SHAPE
        | {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "mistral": TinyModel(1, 0.22, "MistralConfig", _SHAPE | {"sliding_window": 24}),
    "olmo2": TinyModel(7, 0.22, "Olmo2Config", _SHAPE, embedding=1.0),
    "olmo3": TinyModel(
        1,
        0.22,
        "Olmo3Config",
        _SHAPE
        | {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
        },
    ),
    "phi3": TinyModel(
        3,
        0.22,
        "Phi3Config",
        _SHAPE | {"sliding_window": 24, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3-longrope": TinyModel(
        1,
        0.22,
        "Phi3Config",
        _SHAPE
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 224,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.25, 1.5, 2.0],
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
        },
    ),
    "qwen2": TinyModel(12, 0.3, "Qwen2Config", _SHAPE | {"tie_word_embeddings": True}),
    "qwen2-window": TinyModel(
        7, 0.22, "Qwen2Config", _SHAPE | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3": TinyModel(4, 0.22, "Qwen3Config", _SHAPE | {"head_dim": 32}),
    "smollm3": TinyModel(
        7,
        0.22,
        "SmolLM3Config",
        _SHAPE | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
    ),
    "starcoder2": TinyModel(3, 0.3, "Starcoder2Config", _SHAPE | {"sliding_window": 24}, embedding=0.2),
    "starcoder2-unbiased": TinyModel(
        2, 0.3, "Starcoder2Config", _SHAPE | {"use_bias": False, "tie_word_embeddings": False}
    ),
    "rope-linear": TinyModel(
        3, 0.22, "LlamaConfig", _SHAPE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "rope-dynamic": TinyModel(
        1,
        0.22,
        "LlamaConfig",
        _SHAPE
        | {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "rope-llama3": TinyModel(
        5,
        0.22,
        "LlamaConfig",
        _SHAPE
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "rope-yarn": TinyModel(
        2,
        0.22,
        "Qwen2Config",
        _SHAPE
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope-longrope": TinyModel(1, 0.22, "LlamaConfig", _SHAPE | {"rope_parameters": _LONGROPE}),
    "granite": TinyModel(1, 0.22, "GraniteConfig", _SHAPE | _MULTIPLIERS),
    "granite-longrope": TinyModel(1, 0.22, "GraniteConfig", _SHAPE | _MULTIPLIERS | {"rope_parameters": _LONGROPE}),
    "hyperclovax": TinyModel(6, 0.22, "HyperCLOVAXConfig", _SHAPE | _MULTIPLIERS | {"mlp_bias": True}),
    "gpt-neox": TinyModel(3, 0.3, "GPTNeoXConfig", _NEOX),
    "gpt-neox-sequential": TinyModel(
        4,
        0.3,
        "GPTNeoXConfig",
        _NEOX
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi": TinyModel(6, 0.3, "PhiConfig", _SHAPE),
    "stablelm": TinyModel(2, 0.22, "StableLmConfig", _SHAPE | {"use_qkv_bias": True}),
    "stablelm-parallel": TinyModel(2, 0.22, "StableLmConfig", _SHAPE | {"use_parallel_residual": True}),
    "stablelm-head-norms": TinyModel(4, 0.22, "StableLmConfig", _SHAPE | {"qk_layernorm": True}),
    "glm": TinyModel(2, 0.22, "GlmConfig", _SHAPE | {"head_dim": 32}),
    "glm4": TinyModel(1, 0.22, "Glm4Config", _SHAPE | {"head_dim": 32, "attention_bias": False}),
    "seed-oss": TinyModel(1, 0.22, "SeedOssConfig", _SHAPE | {"head_dim": 32}),
    "helium": TinyModel(3, 0.22, "HeliumConfig", _SHAPE | {"head_dim": 16}),
    "ernie-4.5": TinyModel(6, 0.22, "Ernie4_5Config", _SHAPE | {"head_dim": 32, "use_bias": True}),
    "internlm3": TinyModel(2, 0.22, "InternLM3Config", _SHAPE | {"head_dim": 32}),
    "arcee": TinyModel(3, 0.3, "ArceeConfig", _SHAPE),
    "nemotron": TinyModel(3, 0.15, "NemotronConfig", _SHAPE | {"mlp_bias": True}),
    "hunyuan": TinyModel(
        8,
        0.22,
        "HunYuanDenseV1Config",
        _SHAPE
        | {
            "head_dim": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "apertus": TinyModel(
        291,
        0.3,
        "ApertusConfig",
        _SHAPE | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "jais2": TinyModel(1, 0.22, "Jais2Config", _SHAPE),
}
FAMILIES = ("gemma3", "gpt2", "llama", "mistral", "qwen2", "qwen3")
EACH_MODEL = [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.proof) for name in MODELS]


OTHERS = {
    "cwm": TinyModel(
        2,
        0.22,
        "CwmConfig",
        _SHAPE
        | {
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "bos_token_id": 0,
        },
    ),
    "gpt-oss": TinyModel(
        2,
        0.22,
        "GptOssConfig",
        _SHAPE
        | {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmoe": TinyModel(1, 0.22, "OlmoeConfig", _SHAPE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": TinyModel(
        1, 0.3, "OPTConfig", _SHAPE | {"ffn_dim": 96, "word_embed_proj_dim": 48, "tie_word_embeddings": False}
    ),
    "vaultgemma": TinyModel(
        4,
        0.22,
        "VaultGemmaConfig",
        _SHAPE
        | {
            "head_dim": 32,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Those that run by transformers' classes."""

_SIGHT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "image_size": 28, "patch_size": 14}
_QWEN_SIGHT: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_WITH_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
_OF_IMAGES = "AutoModelForImageTextToText"
WITH_IMAGES = {
    "gemma3-images": TinyModel(
        2,
        0.22,
        "Gemma3Config",
        {
            "text_config": MODELS["gemma3"].settings,
            "vision_config": _SIGHT | _WITH_LAYERS,
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": False,
        },
        _OF_IMAGES,
    ),
    "mistral3-images": TinyModel(
        1,
        0.22,
        "Mistral3Config",
        {
            "text_config": _SHAPE | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
            "vision_config": _SIGHT | _WITH_LAYERS | {"head_dim": 16, "model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
        _OF_IMAGES,
    ),
    "qwen2.5-images": TinyModel(
        1,
        0.22,
        "Qwen2_5_VLConfig",
        {
            "text_config": _SHAPE
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "vision_config": _QWEN_SIGHT | {"fullatt_block_indexes": [0]},
        },
        _OF_IMAGES,
    ),
    "qwen3-images": TinyModel(
        1,
        0.22,
        "Qwen3VLConfig",
        {
            "text_config": _SHAPE
            | {
                "head_dim": 32,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
            },
            "vision_config": _QWEN_SIGHT | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
        _OF_IMAGES,
    ),
}
"""Configurations of models with images, of which only the text model runs."""


_folders: list[TemporaryDirectory[str]] = []  # held so that they are removed at exit


@dataclass(frozen=True)
class Reference:
    """What transformers' `generate` answers, greedily and one prompt at a time."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[Tensor]  # float32 [NEW_TOKENS, VOCAB] each


def make(tiny: TinyModel) -> transformers.PreTrainedModel:
    """The model in float32, the same every time."""
    config = getattr(transformers, tiny.config_class)(**tiny.settings)
    torch.manual_seed(tiny.seed)
    model = getattr(transformers, tiny.auto_class).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, tiny.embedding if "wte" in name or "embed" in name else tiny.width)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def _tiny(name: str) -> TinyModel:
    return (MODELS | OTHERS | WITH_IMAGES)[name]


@cache
def folder(name: str) -> Path:
    """The model's checkpoint, as transformers saves it."""
    _folders.append(TemporaryDirectory(prefix=f"{name}-"))
    path = Path(_folders[-1].name)
    make(_tiny(name)).save_pretrained(path)
    return path


@cache
def reference(name: str) -> Reference:
    """The model's answers to prompts of very different lengths, computed once."""
    tiny = _tiny(name)
    model = make(tiny)
    generator = torch.Generator().manual_seed(tiny.seed)
    prompts = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    tokens, logits = [], []
    for prompt in prompts:
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )
        tokens.append(answer.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(answer.logits).float())
    return Reference(prompts, tokens, logits)


@cache
def prompt_logits(name: str) -> list[Tensor]:
    """What transformers' model says about the prompts of `reference(name)`, float32 [len(prompt),
    VOCAB] each.
    """
    model = make(MODELS[name])
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in reference(name).prompts]
