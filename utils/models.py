"""Architectures: the exact shape of every parameter, for the models of the book and any like them.

An `Architecture` is what a Hugging Face `config.json` says about memory, under one set of names
for the five families. It comes from `get` (a known name, or the path of a config.json) or from
`from_config`, which are the only places where a config is checked. `Architecture.tensors` lists
what `named_parameters()` of the transformers model would list, without building the model.

Known models are excerpts of their published config.json in `published_models.py` and go through
the same checks as a reader's own file: to add a model, add an excerpt there.

Sources: transformers 5.24, `models/{gpt2,llama,mistral,qwen2,qwen3}/{configuration,modeling}_*.py`.

Legend for shapes: V vocabulary, D hidden size, F intermediate size, P positions,
Q = heads x head_dim, K = kv_heads x head_dim. A linear layer's weight is (out, in); GPT-2's
`Conv1D` weight is (in, out).

Only the standard library is imported: the command line, the notebooks and the calculator page
run this file unchanged.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from utils.errors import InputError, did_you_mean
from utils.published_models import PUBLISHED

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 10_000  # `tensors` writes every layer out: a mistyped number must not fill the memory


class ModelError(InputError):
    """The model is unknown, or its config.json cannot be read or is not one that is modelled."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with everything that decides the size of its tensors.

    Sizes are numbers of elements, layers, heads or tokens. Made by `get` and `from_config`;
    `dataclasses.replace(architecture, layers=2)` gives a small variant.
    """

    name: str
    source: str  # where the config.json is: a URL or a path
    family: str  # transformers' model_type, one of FAMILIES
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    layers: int
    heads: int
    kv_heads: int  # fewer than `heads` with grouped-query attention
    head_dim: int
    max_positions: int  # P: the longest sequence; GPT-2 has a parameter row for each position
    tied_embeddings: bool  # the output head is the input embedding: one tensor, counted once
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each head of queries and keys (Qwen3)
    norm_eps: float
    attention_dropout: float  # on the attention probabilities
    residual_dropout: float  # on what a sublayer adds to the residual stream (GPT-2 alone)
    embedding_dropout: float  # on the embeddings (GPT-2 alone)
    sliding_window: int | None  # attention reaches back this many tokens; None: all (Mistral alone)
    rope: str | None  # rotary embedding parameters as canonical JSON; None for learned positions

    @property
    def gated_mlp(self) -> bool:
        """SwiGLU with three matrices; False means GPT-2's two matrices with a GELU between."""
        return self.family != "gpt2"

    @property
    def learned_positions(self) -> bool:
        """Positions are a table of parameters (GPT-2) and not rotations."""
        return self.family == "gpt2"

    @property
    def query_size(self) -> int:
        """Q: elements of all queries of one token; differs from D where head_dim is explicit."""
        return self.heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """K: elements of all keys, and also of all values, of one token."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """The exact number of parameters. A tied head counts once."""
        return (
            _elements(self._embedding_tensors())
            + self.layers * _elements(self.block_tensors())
            + _elements(self._final_tensors())
        )

    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of every parameter, named and ordered as transformers' named_parameters().

        >>> get("llama-3.1-8b").tensors()[0]
        ('model.embed_tokens.weight', (128256, 4096))
        """
        blocks = "transformer.h" if self.family == "gpt2" else "model.layers"
        named = self._embedding_tensors()
        for layer in range(self.layers):
            named += [(f"{blocks}.{layer}.{name}", shape) for name, shape in self.block_tensors()]
        return tuple(named + self._final_tensors())

    def block_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name within the block, shape) of every parameter of one transformer block."""
        D, F, Q, K = self.hidden_size, self.intermediate_size, self.query_size, self.key_value_size
        if self.family == "gpt2":
            return [
                *_layer_norm("ln_1", D),
                *_conv1d("attn.c_attn", D, 3 * D),
                *_conv1d("attn.c_proj", D, D),
                *_layer_norm("ln_2", D),
                *_conv1d("mlp.c_fc", D, F),
                *_conv1d("mlp.c_proj", F, D),
            ]
        qk_norm = [
            ("self_attn.q_norm.weight", (self.head_dim,)),
            ("self_attn.k_norm.weight", (self.head_dim,)),
        ]
        return [
            *_linear("self_attn.q_proj", D, Q, self.qkv_bias),
            *_linear("self_attn.k_proj", D, K, self.qkv_bias),
            *_linear("self_attn.v_proj", D, K, self.qkv_bias),
            *_linear("self_attn.o_proj", Q, D, self.output_bias),
            *(qk_norm if self.qk_norm else []),
            *_linear("mlp.gate_proj", D, F, self.mlp_bias),
            *_linear("mlp.up_proj", D, F, self.mlp_bias),
            *_linear("mlp.down_proj", F, D, self.mlp_bias),
            ("input_layernorm.weight", (D,)),
            ("post_attention_layernorm.weight", (D,)),
        ]

    def _embedding_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        V, D, P = self.vocab_size, self.hidden_size, self.max_positions
        if self.family == "gpt2":
            return [("transformer.wte.weight", (V, D)), ("transformer.wpe.weight", (P, D))]
        return [("model.embed_tokens.weight", (V, D))]

    def _final_tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        V, D = self.vocab_size, self.hidden_size
        norm = _layer_norm("transformer.ln_f", D) if self.family == "gpt2" else [("model.norm.weight", (D,))]
        return norm if self.tied_embeddings else [*norm, ("lm_head.weight", (V, D))]

    def hf_config(self) -> dict:
        """The keyword arguments with which `transformers.AutoConfig.for_model(**...)` builds it.

        The result holds JSON types only, and `from_config` reads it back.
        """
        config = {
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": self.tied_embeddings,
            # Token ids belong to the tokenizer. Left at the library's defaults, they make
            # transformers warn whenever the vocabulary is smaller than the published one.
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if self.family == "gpt2":
            return {
                **config,
                "n_positions": self.max_positions,
                "n_embd": self.hidden_size,
                "n_layer": self.layers,
                "n_head": self.heads,
                "n_inner": self.intermediate_size,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": self.norm_eps,
                "attn_pdrop": self.attention_dropout,
                "resid_pdrop": self.residual_dropout,
                "embd_pdrop": self.embedding_dropout,
            }
        config.update(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_act="silu",
            max_position_embeddings=self.max_positions,
            rms_norm_eps=self.norm_eps,
            attention_dropout=self.attention_dropout,
            rope_parameters=json.loads(self.rope),
        )
        if self.family in ("llama", "qwen3"):
            config["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            config["mlp_bias"] = self.mlp_bias
        if self.family == "mistral":
            config["sliding_window"] = self.sliding_window
        return config


def _elements(tensors) -> int:
    return sum(math.prod(shape) for _, shape in tensors)


def _linear(name: str, d_in: int, d_out: int, bias: bool):
    weight = (f"{name}.weight", (d_out, d_in))
    return [weight, (f"{name}.bias", (d_out,))] if bias else [weight]


def _conv1d(name: str, d_in: int, d_out: int):
    return [(f"{name}.weight", (d_in, d_out)), (f"{name}.bias", (d_out,))]


def _layer_norm(name: str, size: int):
    return [(f"{name}.weight", (size,)), (f"{name}.bias", (size,))]


def names() -> tuple[str, ...]:
    """The known models, family by family and small to large within a series."""
    return tuple(PUBLISHED)


def get(name_or_path) -> Architecture:
    """The architecture of a known name, of a config.json, or of a directory that holds one.

    A known name wins over a file of the same name; write `./name` for the file.
    Raises ModelError for an unknown name, an unreadable file and a config that is not modelled.
    """
    given = str(name_or_path)
    if given in PUBLISHED:
        hub_id, config = PUBLISHED[given]
        return from_config(config, name=given, source=f"https://huggingface.co/{hub_id}")

    import os  # not needed for known names, which is all that the browser has

    path = os.path.join(given, "config.json") if os.path.isdir(given) else given
    if not os.path.isfile(path):
        if os.path.isdir(given):
            raise ModelError(f"model: directory {given!r} holds no config.json")
        hint = did_you_mean(given.rsplit("/", 1)[-1], PUBLISHED)
        raise ModelError(
            f"model: {given!r} is neither a known name nor the path of a config.json{hint} "
            "(`python -m utils models` lists the names)"
        )
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except (OSError, ValueError, RecursionError) as error:  # no permission, not UTF-8, too deep
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return from_config(config, name=given, source=path)


def from_config(config: dict, name: str = "config", source: str | None = None) -> Architecture:
    """Read the contents of a config.json, as written by transformers 4 or 5.

    What sets a shape must be in the file; other keys may be absent and then mean what they mean
    to transformers. Keys that its model class ignores are ignored here too; keys that would
    change the model in a way that is not modelled (quantization, other activations, layers that
    differ from each other) are refused. `source` (default: `name`) opens each line of the
    ModelError that is raised; one error reports all problems.
    """
    source = name if source is None else source
    if not isinstance(config, dict):
        raise ModelError(f"{source}: {_shown(config)} is not a JSON object of fields")
    family = config.get("model_type")
    if family not in FAMILIES:
        was = "missing" if family is None else f"{_shown(family)} is not modelled"
        raise ModelError(f"{source}: model_type: {was}; allowed: {', '.join(FAMILIES)}")
    reader = _Reader(config, source)
    reader.only("quantization_config", None)
    reader.only("per_layer_config", None)  # transformers 5.24: layers of different shapes
    fields = _read_gpt2(reader) if family == "gpt2" else _read_llama_like(reader, family)
    if reader.errors:
        raise ModelError(*reader.errors)
    return Architecture(name=name, source=source, family=family, **fields)


def _read_gpt2(reader: _Reader) -> dict:
    hidden_size = reader.size("n_embd")
    heads = reader.size("n_head")
    reader.multiple("n_embd", hidden_size, "n_head", heads)
    reader.only("activation_function", "gelu_new")
    reader.only("add_cross_attention", False)
    reader.only("scale_attn_weights", True)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    reader.only("reorder_and_upcast_attn", False)
    return {
        "vocab_size": reader.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.size("n_inner", optional=True) or 4 * (hidden_size or 0),
        "layers": reader.size("n_layer", _MAX_LAYERS),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _quotient(hidden_size, heads),
        "max_positions": reader.size("n_positions"),
        "tied_embeddings": reader.flag("tie_word_embeddings", True),
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "norm_eps": reader.positive("layer_norm_epsilon", 1e-5),
        "attention_dropout": reader.probability("attn_pdrop", 0.1),
        "residual_dropout": reader.probability("resid_pdrop", 0.1),
        "embedding_dropout": reader.probability("embd_pdrop", 0.1),
        "sliding_window": None,
        "rope": None,
    }


def _read_llama_like(reader: _Reader, family: str) -> dict:
    hidden_size = reader.size("hidden_size")
    layers = reader.size("num_hidden_layers", _MAX_LAYERS)
    heads = reader.size("num_attention_heads")
    # A LLaMA 1 file has no key-value heads and means one for each head. For the other families
    # transformers falls back on the number of one model size, which is a guess for any other.
    kv_heads = reader.size("num_key_value_heads", optional=family == "llama") or heads
    reader.multiple("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = reader.size("head_dim", optional=family != "qwen3")
    if head_dim is None or family == "llama":  # LlamaConfig insists even if head_dim is explicit
        reader.multiple("hidden_size", hidden_size, "num_attention_heads", heads)
    head_dim = head_dim or _quotient(hidden_size, heads)
    if head_dim and head_dim % 2:
        reader.refuse("head_dim", head_dim, "an even number, as rotary embeddings rotate pairs")
    reader.only("hidden_act", "silu")
    all_alike = ["full_attention"] * (layers or 0)
    if layers and reader.config.get("layer_types") not in (None, all_alike):
        reader.refuse("layer_types", reader.config["layer_types"], f"full_attention for all {layers} layers")
    if family in ("qwen2", "qwen3"):
        reader.only("use_sliding_window", False)
    bias = reader.flag("attention_bias", False) if family in ("llama", "qwen3") else False
    sliding_window = None
    if family == "mistral" and reader.config.get("sliding_window", _MISSING) is not None:
        sliding_window = reader.size("sliding_window")
    return {
        "vocab_size": reader.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.size("intermediate_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": reader.size("max_position_embeddings"),
        "tied_embeddings": reader.flag("tie_word_embeddings", False),
        "qkv_bias": bias or family == "qwen2",
        "output_bias": bias,
        "mlp_bias": reader.flag("mlp_bias", False) if family == "llama" else False,
        "qk_norm": family == "qwen3",
        "norm_eps": reader.positive("rms_norm_eps", 1e-6),
        "attention_dropout": reader.probability("attention_dropout", 0.0),
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "sliding_window": sliding_window,
        "rope": reader.rope(),
    }


def _quotient(size: int | None, parts: int | None) -> int | None:
    return size // parts if size and parts else None


_MISSING = object()


class _Reader:
    """Typed access to a config that notes each problem and goes on, so that all are reported.

    The methods return None for a value that they have refused.
    """

    def __init__(self, config: dict, source: str):
        self.config = config
        self.source = source
        self.errors: list[str] = []

    def refuse(self, key: str, value, allowed: str) -> None:
        was = "missing" if value is _MISSING else f"{_shown(value)} is not allowed"
        self.errors.append(f"{self.source}: {key}: {was}; allowed: {allowed}")

    def size(self, key: str, maximum: int = _MAX_SIZE, optional: bool = False) -> int | None:
        """A count of something. An optional one may be null or absent, and is None then."""
        value = self.config.get(key, None if optional else _MISSING)
        if value is None and optional:
            return None
        if type(value) is int and 1 <= value <= maximum:  # a bool is an int too, but not a size
            return value
        self.refuse(key, value, f"an integer from 1 to {maximum}")
        return None

    def flag(self, key: str, default: bool) -> bool | None:
        value = self.config.get(key, default)
        if type(value) is bool:
            return value
        self.refuse(key, value, "true or false")
        return None

    def positive(self, key: str, default: float) -> float | None:
        value = self.config.get(key, default)
        if type(value) in (int, float) and 0 < value < math.inf:
            return float(value)
        self.refuse(key, value, "a number above 0")
        return None

    def probability(self, key: str, default: float) -> float | None:
        value = self.config.get(key, default)
        if type(value) in (int, float) and 0 <= value < 1:
            return float(value)
        self.refuse(key, value, "a number from 0 to below 1")
        return None

    def only(self, key: str, allowed) -> None:
        """Refuse a config that asks for a variant which is not modelled."""
        value = self.config.get(key, allowed)
        if value != allowed:
            self.refuse(key, value, _shown(allowed))

    def multiple(self, key: str, value: int | None, of_key: str, of: int | None) -> None:
        if value and of and value % of:
            self.refuse(key, value, f"a multiple of {of_key} ({of})")

    def rope(self) -> str | None:
        """Transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) in the form of 5."""
        key = "rope_scaling" if self.config.get("rope_scaling") else "rope_parameters"
        parameters = self.config.get(key) or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            self.refuse(key, parameters, "null or one flat object for all layers")
            return None
        parameters = dict(parameters)
        old_type = parameters.pop("type", "default")  # its name before transformers 4.45
        parameters.setdefault("rope_type", old_type)
        parameters.setdefault("rope_theta", self.positive("rope_theta", 10_000.0))
        return json.dumps(parameters, sort_keys=True)


def _shown(value) -> str:
    """A value as JSON spells it, cut to fit a line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
