"""Published models: excerpts of the config.json on each model's page, under their own keys.

An excerpt holds every key that sets a shape and every key whose value is not transformers'
default. `utils.models` reads an excerpt as it reads a whole file. To add a model, paste its keys
here and run tests/test_models.py, which compares each entry with the model that transformers
builds; add the published parameter count there too.

Names are lower case with the size last.
"""

_LLAMA_2 = {
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_1 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA_3_1_ROPE,
    "tie_word_embeddings": False,
}
_LLAMA_3_2 = {
    **_LLAMA_3_1,
    "rope_scaling": {**_LLAMA_3_1_ROPE, "factor": 32.0},
    "tie_word_embeddings": True,
}
_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}
_MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32768,  # of v0.3; v0.1 had 32000
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_QWEN_2_5 = {
    "model_type": "qwen2",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
_QWEN_3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
_GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "layer_norm_epsilon": 1e-5}

# name -> (id on huggingface.co, excerpt of its config.json)
PUBLISHED = {
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B",
        dict(_LLAMA_3_1, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B",
        dict(_LLAMA_3_1, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    ),
    "llama-3.1-405b": (
        "meta-llama/Llama-3.1-405B",
        dict(_LLAMA_3_1, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128),
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B",
        dict(
            _LLAMA_3_2,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            head_dim=64,
        ),
    ),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B",
        dict(
            _LLAMA_3_2,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=28,
            num_attention_heads=24,
            head_dim=128,
        ),
    ),
    "llama-2-7b": (
        "meta-llama/Llama-2-7b-hf",
        dict(
            _LLAMA_2,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
        ),
    ),
    "llama-2-13b": (
        "meta-llama/Llama-2-13b-hf",
        dict(
            _LLAMA_2,
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
        ),
    ),
    "llama-2-70b": (
        "meta-llama/Llama-2-70b-hf",
        dict(
            _LLAMA_2,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
    ),
    "tinyllama-1.1b": (
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        dict(
            _LLAMA_2,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            max_position_embeddings=2048,
        ),
    ),
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M",
        dict(
            _SMOLLM2,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
        ),
    ),
    "smollm2-360m": (
        "HuggingFaceTB/SmolLM2-360M",
        dict(
            _SMOLLM2,
            hidden_size=960,
            intermediate_size=2560,
            num_hidden_layers=32,
            num_attention_heads=15,
            num_key_value_heads=5,
        ),
    ),
    "smollm2-1.7b": (
        "HuggingFaceTB/SmolLM2-1.7B",
        dict(
            _SMOLLM2,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=24,
            num_attention_heads=32,
            num_key_value_heads=32,
            rope_theta=130000,
        ),
    ),
    "mistral-7b": (
        "mistralai/Mistral-7B-v0.3",
        dict(_MISTRAL, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    ),
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B",
        dict(
            _QWEN_2_5,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151936,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-1.5b": (
        "Qwen/Qwen2.5-1.5B",
        dict(
            _QWEN_2_5,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-3b": (
        "Qwen/Qwen2.5-3B",
        dict(
            _QWEN_2_5,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=2,
            vocab_size=151936,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B",
        dict(
            _QWEN_2_5,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
        ),
    ),
    "qwen2.5-14b": (
        "Qwen/Qwen2.5-14B",
        dict(
            _QWEN_2_5,
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
            rms_norm_eps=1e-05,
        ),
    ),
    "qwen2.5-32b": (
        "Qwen/Qwen2.5-32B",
        dict(
            _QWEN_2_5,
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
            rms_norm_eps=1e-05,
        ),
    ),
    "qwen2.5-72b": (
        "Qwen/Qwen2.5-72B",
        dict(
            _QWEN_2_5,
            hidden_size=8192,
            intermediate_size=29568,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=152064,
            rms_norm_eps=1e-05,
        ),
    ),
    "qwen3-0.6b": (
        "Qwen/Qwen3-0.6B",
        dict(
            _QWEN_3,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-1.7b": (
        "Qwen/Qwen3-1.7B",
        dict(
            _QWEN_3,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-4b": (
        "Qwen/Qwen3-4B",
        dict(
            _QWEN_3,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-8b": (
        "Qwen/Qwen3-8B",
        dict(
            _QWEN_3,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3-14b": (
        "Qwen/Qwen3-14B",
        dict(
            _QWEN_3,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=40,
            num_attention_heads=40,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3-32b": (
        "Qwen/Qwen3-32B",
        dict(
            _QWEN_3,
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_attention_heads=64,
            tie_word_embeddings=False,
        ),
    ),
    "gpt2-124m": ("openai-community/gpt2", dict(_GPT2, n_embd=768, n_layer=12, n_head=12)),
    "gpt2-355m": ("openai-community/gpt2-medium", dict(_GPT2, n_embd=1024, n_layer=24, n_head=16)),
    "gpt2-774m": ("openai-community/gpt2-large", dict(_GPT2, n_embd=1280, n_layer=36, n_head=20)),
    "gpt2-1.5b": ("openai-community/gpt2-xl", dict(_GPT2, n_embd=1600, n_layer=48, n_head=25)),
}
