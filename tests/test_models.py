"""utils.models against transformers (names, shapes, order of every parameter) and published counts."""

import dataclasses
import doctest
import json
import logging
import subprocess
import sys
import warnings

import pytest
import torch
import transformers

from utils import errors, models

# Published parameter counts, an independent check beside transformers: the size of each model's safetensors
# on its page, where a tied output head is counted once (some Qwen3 files store it twice). GPT-2's files hold
# the causal masks too; its counts are those of the parameters alone, as in nanoGPT's sizing notebook,
# https://github.com/karpathy/nanoGPT/blob/master/transformer_sizing.ipynb (124,439,808 for the smallest).
PUBLISHED_COUNTS = {
    "llama-3.1-8b": 8_030_261_248,  # https://huggingface.co/meta-llama/Llama-3.1-8B
    "llama-3.1-70b": 70_553_706_496,  # https://huggingface.co/meta-llama/Llama-3.1-70B
    "llama-3.1-405b": 405_853_388_800,  # https://huggingface.co/meta-llama/Llama-3.1-405B (8 KV heads)
    "llama-3.2-1b": 1_235_814_400,  # https://huggingface.co/meta-llama/Llama-3.2-1B
    "llama-3.2-3b": 3_212_749_824,  # https://huggingface.co/meta-llama/Llama-3.2-3B
    "llama-2-7b": 6_738_415_616,  # https://huggingface.co/meta-llama/Llama-2-7b-hf
    "llama-2-13b": 13_015_864_320,  # https://huggingface.co/meta-llama/Llama-2-13b-hf
    "llama-2-70b": 68_976_648_192,  # https://huggingface.co/meta-llama/Llama-2-70b-hf
    "tinyllama-1.1b": 1_100_048_384,  # https://huggingface.co/TinyLlama
    "smollm2-135m": 134_515_008,  # https://huggingface.co/HuggingFaceTB/SmolLM2-135M
    "smollm2-360m": 361_821_120,  # https://huggingface.co/HuggingFaceTB/SmolLM2-360M
    "smollm2-1.7b": 1_711_376_384,  # https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B
    "mistral-7b": 7_248_023_552,  # https://huggingface.co/mistralai/Mistral-7B-v0.3
    "qwen2.5-0.5b": 494_032_768,  # https://huggingface.co/Qwen/Qwen2.5-0.5B
    "qwen2.5-1.5b": 1_543_714_304,  # https://huggingface.co/Qwen/Qwen2.5-1.5B
    "qwen2.5-3b": 3_085_938_688,  # https://huggingface.co/Qwen/Qwen2.5-3B
    "qwen2.5-7b": 7_615_616_512,  # https://huggingface.co/Qwen/Qwen2.5-7B
    "qwen2.5-14b": 14_770_033_664,  # https://huggingface.co/Qwen/Qwen2.5-14B
    "qwen2.5-32b": 32_763_876_352,  # https://huggingface.co/Qwen/Qwen2.5-32B
    "qwen2.5-72b": 72_706_203_648,  # https://huggingface.co/Qwen/Qwen2.5-72B
    "qwen3-0.6b": 596_049_920,  # https://huggingface.co/Qwen/Qwen3-0.6B
    "qwen3-1.7b": 1_720_574_976,  # https://huggingface.co/Qwen/Qwen3-1.7B
    "qwen3-4b": 4_022_468_096,  # https://huggingface.co/Qwen/Qwen3-4B
    "qwen3-8b": 8_190_735_360,  # https://huggingface.co/Qwen/Qwen3-8B
    "qwen3-14b": 14_768_307_200,  # https://huggingface.co/Qwen/Qwen3-14B
    "qwen3-32b": 32_762_123_264,  # https://huggingface.co/Qwen/Qwen3-32B
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
}

LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
GQA = {**LLAMA, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": 500, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}

# Small config.json files, each with something that the published models above do not have.
SMALL = {
    "llama, no key-value heads (LLaMA 1)": LLAMA,
    "llama, grouped queries, tied": {**GQA, "tie_word_embeddings": True},
    "llama, biases": {**GQA, "attention_bias": True, "mlp_bias": True},
    "llama, attention bias alone": {**GQA, "attention_bias": True, "attention_dropout": 0.1},
    "llama, explicit head_dim": {**GQA, "head_dim": 32},
    "llama, head_dim null": {**GQA, "head_dim": None, "num_key_value_heads": None},
    "llama, rope of transformers 4": {**GQA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, rope_scaling null": {**GQA, "rope_theta": 5e5, "rope_scaling": None},
    "llama, rope of transformers 5": {
        **GQA,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 2e4},
        "layer_types": ["full_attention"] * 3,
    },
    "llama, keys of other families": {**GQA, "sliding_window": 64, "use_sliding_window": True, "pretraining_tp": 1},
    "mistral": {**GQA, "model_type": "mistral", "sliding_window": None},
    "mistral, sliding window": {**GQA, "model_type": "mistral", "sliding_window": 32},
    "mistral, odd width with head_dim": {
        **GQA,
        "model_type": "mistral",
        "hidden_size": 100,
        "head_dim": 16,
        "sliding_window": None,
        "attention_bias": True,  # no effect on this family
    },
    "qwen2": {**GQA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
    "qwen2, explicit head_dim": {**GQA, "model_type": "qwen2", "head_dim": 24, "tie_word_embeddings": True},
    "qwen2, attention_bias has no effect": {**GQA, "model_type": "qwen2", "attention_bias": False, "mlp_bias": True},
    "qwen3": {**GQA, "model_type": "qwen3", "head_dim": 20, "tie_word_embeddings": True},
    "qwen3, biases": {**GQA, "model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "gpt2": GPT2,
    "gpt2, n_inner, untied, no dropout": {
        **GPT2,
        "n_inner": 100,
        "tie_word_embeddings": False,
        "attn_pdrop": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.2,
    },
    "gpt2, keys of its file": {**GPT2, "n_ctx": 64, "n_inner": None, "summary_type": "cls_index"},
}


def build(config):
    """The transformers model of a config, without memory. Any warning fails the test."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("error")
            config = transformers.AutoConfig.for_model(**config)
            model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        logger.removeHandler(handler)
    assert messages == []
    return model


def shapes(model):
    return tuple((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def stated(config):
    """What a transformers config says about the model: the fields of its class, each in one spelling."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for not_of_the_model in ("bos_token_id", "eos_token_id", "architectures"):
        fields.pop(not_of_the_model)
    fields.pop("max_window_layers", None)  # without effect while use_sliding_window is false
    if config.model_type == "gpt2":
        fields["n_inner"] = config.n_inner or 4 * config.n_embd
    if fields.get("rope_parameters"):
        fields["rope_parameters"] = {k: v for k, v in fields["rope_parameters"].items() if k != "type"}  # is rope_type
    return fields


def test_doctests():
    for module in (models, errors):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0


# --- the listed models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.names())
def test_listed_model_is_the_transformers_model(name):
    architecture = models.get(name)
    model = build(architecture.hf_config())
    assert architecture.tensors() == shapes(model)
    assert architecture.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_published_parameter_counts():
    assert {name: models.get(name).parameters for name in models.names()} == PUBLISHED_COUNTS


@pytest.mark.parametrize("name", models.names())
def test_listed_model_names_its_source(name):
    architecture = models.get(name)
    assert architecture.name == name == name.lower()
    assert architecture.source.startswith("https://huggingface.co/")


@pytest.mark.parametrize("name", models.names())
def test_hf_config_survives_json_and_reads_back(name):
    architecture = models.get(name)
    config = json.loads(json.dumps(architecture.hf_config()))
    assert models.from_config(config, name=name, source=architecture.source) == architecture


def test_facts_of_single_models():
    llama, gpt2 = models.get("llama-3.1-8b"), models.get("gpt2-1.5b")
    assert (llama.query_size, llama.key_value_size) == (4096, 1024)
    assert (llama.gated_mlp, llama.learned_positions) == (True, False)
    assert (gpt2.gated_mlp, gpt2.learned_positions) == (False, True)
    assert json.loads(llama.rope)["rope_type"] == "llama3"
    assert gpt2.rope is None
    assert (gpt2.attention_dropout, gpt2.residual_dropout, gpt2.embedding_dropout) == (0.1, 0.1, 0.1)
    assert (llama.attention_dropout, llama.residual_dropout, llama.embedding_dropout) == (0.0, 0.0, 0.0)
    assert models.get("mistral-7b").sliding_window is None


def test_a_smaller_variant_by_replace():
    architecture = dataclasses.replace(models.get("qwen3-1.7b"), layers=2)
    assert architecture.tensors() == shapes(build(architecture.hf_config()))


# --- a reader's own config.json ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_config_file_is_the_transformers_model(config, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    architecture = models.get(path)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    ours = build(architecture.hf_config())
    assert architecture.tensors() == shapes(theirs) == shapes(ours)
    assert stated(ours.config) == stated(theirs.config)
    assert models.from_config(architecture.hf_config(), architecture.name, architecture.source) == architecture


@pytest.mark.parametrize("family", models.FAMILIES)
def test_config_file_saved_by_the_installed_transformers(family, tmp_path):
    architecture = next(filter(lambda one: one.family == family, map(models.get, models.names())))
    build(architecture.hf_config()).config.save_pretrained(tmp_path)
    assert models.get(tmp_path) == dataclasses.replace(
        architecture, name=str(tmp_path), source=str(tmp_path / "config.json")
    )


def test_directory_and_file_name_the_same_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GQA))
    by_directory, by_file = models.get(tmp_path), models.get(str(tmp_path / "config.json"))
    assert by_directory.source == by_file.source == by_file.name
    assert by_directory.tensors() == by_file.tensors()


def test_mistral_window_and_gpt2_dropout_are_kept():
    assert models.from_config(SMALL["mistral, sliding window"]).sliding_window == 32
    gpt2 = models.from_config(SMALL["gpt2, n_inner, untied, no dropout"])
    assert (gpt2.attention_dropout, gpt2.residual_dropout, gpt2.embedding_dropout) == (0.0, 0.0, 0.2)
    assert models.from_config(SMALL["llama, attention bias alone"]).attention_dropout == 0.1


# --- errors: one line a problem, naming field, value and what is allowed ----------------------------------


def problems(call, *args):
    with pytest.raises(models.ModelError) as raised:
        call(*args)
    lines = raised.value.errors
    assert str(raised.value) == "\n".join(lines)
    assert not any("\n" in line for line in lines)
    return lines


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("llama-3.1-8", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("qwen3-1.7", "qwen3-1.7b"),
        ("gpt2-xl-1.5b", "gpt2-1.5b"),
    ],
)
def test_unknown_name_suggests_the_nearest(given, nearest):
    (line,) = problems(models.get, given)
    assert line.startswith(f"model: {given!r} is neither a known name nor the path of a config.json; did you mean ")
    assert nearest in line
    assert "`python -m utils models` lists the names" in line


@pytest.mark.parametrize("given", ["", "zzz", None, 8])
def test_name_like_none_of_ours(given):
    (line,) = problems(models.get, given)
    assert "did you mean" not in line


def test_directory_without_config(tmp_path):
    assert problems(models.get, tmp_path) == [f"model: directory {str(tmp_path)!r} holds no config.json"]


def test_file_that_is_not_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{\n  "model_type": "llama",\n  "vocab_size" 32000\n}')
    (line,) = problems(models.get, tmp_path)
    assert line.startswith(f"{path}: not JSON: line 3, column 16: ")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"])
def test_file_that_cannot_be_read(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    (line,) = problems(models.get, tmp_path)
    assert line.startswith(str(tmp_path / "config.json"))


def test_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1, 2]")
    assert problems(models.get, tmp_path) == [f"{tmp_path / 'config.json'}: [1, 2] is not a JSON object of fields"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gemma2", "", 3, ["llama"]])
def test_other_family(family):
    assert problems(models.from_config, {**GQA, "model_type": family}) == [
        f"config: model_type: {json.dumps(family)} is not modelled; allowed: gpt2, llama, mistral, qwen2, qwen3"
    ]


def test_no_family():
    (line,) = problems(models.from_config, {"hidden_size": 64})
    assert line == "config: model_type: missing; allowed: gpt2, llama, mistral, qwen2, qwen3"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((GQA, key) for key in LLAMA if key != "model_type"),
        *((GPT2, key) for key in GPT2 if key != "model_type"),
        (SMALL["mistral"], "num_key_value_heads"),
        (SMALL["mistral"], "sliding_window"),
        (SMALL["qwen2"], "num_key_value_heads"),
        (SMALL["qwen3"], "head_dim"),
    ],
)
def test_missing_field(config, key):
    (line,) = problems(models.from_config, {k: v for k, v in config.items() if k != key})
    assert line.startswith(f"config: {key}: missing; allowed: an integer from 1 to ")


@pytest.mark.parametrize("value", [0, -1, 64.0, 1.5, "64", True, None, [64], 2**31])
@pytest.mark.parametrize(("config", "key"), [(GQA, "hidden_size"), (GQA, "vocab_size"), (GPT2, "n_layer")])
def test_field_that_is_no_size(config, key, value):
    (line,) = problems(models.from_config, {**config, key: value})
    assert line.startswith(f"config: {key}: {json.dumps(value)} is not allowed; allowed: an integer from 1 to ")


@pytest.mark.parametrize(
    ("config", "change", "was", "allowed"),
    [
        (GQA, {"num_key_value_heads": 4}, "num_attention_heads: 6", "a multiple of num_key_value_heads (4)"),
        (LLAMA, {"hidden_size": 100}, "hidden_size: 100", "a multiple of num_attention_heads (6)"),
        (GPT2, {"n_head": 5}, "n_embd: 48", "a multiple of n_head (5)"),
        (GQA, {"head_dim": 15}, "head_dim: 15", "an even number, as rotary embeddings rotate pairs"),
        (GQA, {"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000", "an integer from 1 to 10000"),
        (
            GQA,
            {"layer_types": ["full_attention"]},
            'layer_types: ["full_attention"]',
            "full_attention for all 3 layers",
        ),
        (GQA, {"tie_word_embeddings": "yes"}, 'tie_word_embeddings: "yes"', "true or false"),
        (GQA, {"attention_bias": 1}, "attention_bias: 1", "true or false"),
        (GQA, {"attention_dropout": 1.0}, "attention_dropout: 1.0", "a number from 0 to below 1"),
        (GPT2, {"attn_pdrop": -0.1}, "attn_pdrop: -0.1", "a number from 0 to below 1"),
        (GQA, {"rms_norm_eps": 0}, "rms_norm_eps: 0", "a number above 0"),
        (GQA, {"rms_norm_eps": float("nan")}, "rms_norm_eps: NaN", "a number above 0"),
        (GQA, {"rope_theta": "1e4"}, 'rope_theta: "1e4"', "a number above 0"),
        (GQA, {"rope_parameters": 3}, "rope_parameters: 3", "null or one flat object for all layers"),
        (GQA, {"hidden_act": "gelu"}, 'hidden_act: "gelu"', '"silu"'),
        (GPT2, {"activation_function": "relu"}, 'activation_function: "relu"', '"gelu_new"'),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention: true", "false"),
        (SMALL["qwen2"], {"use_sliding_window": True}, "use_sliding_window: true", "false"),
        (GQA, {"quantization_config": {"bits": 4}}, 'quantization_config: {"bits": 4}', "null"),
    ],
)
def test_value_that_is_not_modelled(config, change, was, allowed):
    assert problems(models.from_config, {**config, **change}) == [f"config: {was} is not allowed; allowed: {allowed}"]


def test_rope_that_differs_between_layers():
    (line,) = problems(models.from_config, {**GQA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}})
    assert line.startswith("config: rope_parameters: ")


def test_all_problems_at_once_with_the_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GQA, "hidden_size": -5, "num_hidden_layers": 2.5, "vocab_size": None}))
    lines = problems(models.get, path)
    assert [line.split(": ")[:2] for line in lines] == [
        [str(path), "hidden_size"],
        [str(path), "num_hidden_layers"],
        [str(path), "vocab_size"],
    ]


def test_a_long_value_is_cut():
    (line,) = problems(models.from_config, {**GQA, "quantization_config": {"modules": ["lm_head"] * 100}})
    assert len(line) < 150


# --- what the calculator page and the command line rely on ------------------------------------------------


def test_imports_only_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import utils.models, utils.hardware; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["utils"]
