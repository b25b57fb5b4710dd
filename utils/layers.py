"""The decoder layers and the output head of transformers' models, played on a ledger.

Each function follows the ``forward`` it names, line by line, and frees what Python frees there. A
:class:`Structure` holds what changes the sequence of allocations; sizes stay symbolic, so one replay
serves every model of a structure.

Sources: transformers 5.17 to 5.24, models/llama/modeling_llama.py (mistral, qwen2 and qwen3 are
generated from it), models/gpt2/modeling_gpt2.py, loss/loss_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from utils import operations as ops
from utils.ledger import Parameter

COMPUTE = ops.COMPUTE
FLOAT32 = ops.FLOAT32


@dataclass(frozen=True)
class Structure:
    """What decides the sequence of allocations of a model under a setup."""

    gpt2: bool
    attention: str  # "eager" | "sdpa"
    stream: int  # bytes an element of the residual stream and of the parameters: 2 or 4
    grouped: bool  # fewer key heads than query heads
    one_key_head: bool  # a single key head for all query heads
    one_sequence: bool  # a micro-batch of one
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_dropout: bool
    residual_dropout: bool
    embedding_dropout: bool
    tied: bool

    # Names of sizes, bound to numbers by utils.memory.
    tokens_hidden = "tokens*hidden"
    tokens_query = "tokens*query"
    tokens_kv = "tokens*kv"
    tokens_ffn = "tokens*ffn"
    tokens_vocab = "tokens*vocab"
    head_rows = "tokens*heads"
    scores = "batch*heads*seq*seq"


def decoder_layer(ledger, s, x):
    """One layer, ``x -> y``; ``x`` belongs to the caller."""
    return gpt2_block(ledger, s, x) if s.gpt2 else llama_layer(ledger, s, x)


# -- Llama, Mistral, Qwen2, Qwen3 --------------------------------------------------------------------


def llama_layer(ledger, s, x):
    """``LlamaDecoderLayer.forward``."""
    normed = ops.rms_norm(ledger, x, Parameter("hidden"), "tokens", s.stream, "input norm")
    attended, weights = llama_attention(ledger, s, normed)
    ledger.drop(normed)
    middle = ops.add(ledger, x, attended, "residual after attention")
    ledger.drop(attended)

    normed = ops.rms_norm(ledger, middle, Parameter("hidden"), "tokens", s.stream, "post-attention norm")
    fed = llama_mlp(ledger, s, normed)
    ledger.drop(normed)
    out = ops.add(ledger, middle, fed, "residual after the MLP")
    ledger.drop(fed, middle, *weights)
    return out


def llama_attention(ledger, s, x):
    """``LlamaAttention.forward`` (and Qwen3's, which normalises each query and key head).

    Returns the output and, in a tuple, the attention weights, if they exist: the layer holds them to its end.
    """

    def project(name, out_dims, columns, relayout):
        bias = Parameter(columns) if s.qkv_bias else None
        weight = Parameter("hidden*" + columns)
        return ops.linear(ledger, x, weight, out_dims, s.stream, name, bias=bias, relayout=relayout)

    def head_norm(states, rows, name):
        normed = ops.rms_norm(ledger, states, Parameter("head_dim"), rows, s.stream, name)
        ledger.drop(states)
        return normed

    # v's gradient comes back from the fused kernel in rows, from the eager product in heads.
    query = project("query projection", s.tokens_query, "query", True)
    if s.qk_norm:
        query = head_norm(query, "tokens*heads", "query norm")
    key = project("key projection", s.tokens_kv, "kv", True)
    if s.qk_norm:
        key = head_norm(key, "tokens*kv_heads", "key norm")
    value = project("value projection", s.tokens_kv, "kv", s.attention == "eager")

    rotated_query = ops.rotary(ledger, query, "tokens*query/2", s.stream, "rotary, queries")
    rotated_key = ops.rotary(ledger, key, "tokens*kv/2", s.stream, "rotary, keys")
    ledger.drop(query, key)

    attend = llama_eager_attention if s.attention == "eager" else sdpa_attention
    attended, weights = attend(ledger, s, rotated_query, rotated_key, value)
    bias = Parameter("hidden") if s.output_bias else None
    weight = Parameter("hidden*query")
    out = ops.linear(ledger, attended, weight, s.tokens_hidden, s.stream, "output projection", bias=bias)
    ledger.drop(attended, rotated_query, rotated_key, value)
    return out, weights


def sdpa_attention(ledger, s, query, key, value):
    """``sdpa_attention_forward``: no mask, ``is_causal`` instead; the output is already in rows."""
    return ops.fused_attention(ledger, query, key, value, s, "attention"), ()


def llama_eager_attention(ledger, s, query, key, value):
    """``eager_attention_forward`` of modeling_llama.py: the scores exist, several times."""
    keys = ops.repeat_kv(ledger, key, s, "repeated keys")
    values = ops.repeat_kv(ledger, value, s, "repeated values")

    query_operand = ops.cast(ledger, query, COMPUTE, "queries to bfloat16")
    key_operand = ops.cast(ledger, keys, COMPUTE, "keys to bfloat16")
    query_heads = ops.head_major(ledger, query_operand, s, "queries by head")
    key_heads = key_operand
    if not s.grouped:
        key_heads = ops.head_major(ledger, key_operand, s, "keys by head")
        ledger.drop(key_operand)
    ledger.drop(query_operand)
    masked = _masked_scores(ledger, s, query_heads, key_heads)

    wide = ops.cast(ledger, masked, FLOAT32, "scores to float32")
    weights = ops.softmax(ledger, wide, "softmax")
    ledger.drop(wide)
    narrow = ops.cast(ledger, weights, s.stream, "attention weights, in the stream's type")
    ledger.drop(weights, masked)
    narrow = _dropped(ledger, s.attention_dropout, narrow, "attention dropout")

    operand = ops.cast(ledger, narrow, COMPUTE, "attention weights to bfloat16")
    value_heads = values
    if not s.grouped:
        value_heads = ops.head_major(ledger, values, s, "values by head")
        ledger.drop(values)
    out = _weighted_values(ledger, s, operand, value_heads)
    ledger.drop(keys)
    return out, (narrow,)


def _masked_scores(ledger, s, query_heads, key_heads):
    """``matmul(query, key) * scaling + mask``; the operands go."""
    products = ops.batched_product(ledger, query_heads, key_heads, s.scores, "scores")
    ledger.drop(query_heads, key_heads)
    scores = ops.scale(ledger, products, "scaled scores")
    ledger.drop(products)
    masked = ops.add_mask(ledger, scores, s.stream, "masked scores")
    ledger.drop(scores)
    return masked


def _weighted_values(ledger, s, weights, value_heads):
    """``matmul(weights, value).transpose(1, 2).contiguous()``; the operands go."""
    relayout = None if s.one_sequence else "attention (backward): gradient by head"
    heads = ops.batched_product(ledger, weights, value_heads, s.tokens_query, "attention", relayout)
    ledger.drop(weights, value_heads)
    out = ledger.new(*heads.size, "attention output, in rows")

    def backward(gradient):
        return [ledger.keep(gradient)]  # only viewed

    ledger.record(out, [heads], (), backward)
    ledger.drop(heads)
    return out


def _dropped(ledger, active, x, name):
    """``nn.Dropout`` on ``x``, which goes; without dropout ``x`` itself."""
    if not active:
        return x
    out = ops.dropout(ledger, x, name)
    ledger.drop(x)
    return out


def llama_mlp(ledger, s, x):
    """``LlamaMLP.forward``: ``down(silu(gate(x)) * up(x))``."""

    def project(name, source, dims, out_dims, columns):
        bias = Parameter(columns) if s.mlp_bias else None
        return ops.linear(ledger, source, Parameter(dims), out_dims, s.stream, name, bias=bias)

    gate = project("gate projection", x, "hidden*ffn", s.tokens_ffn, "ffn")
    activated = ops.silu(ledger, gate, "silu")
    ledger.drop(gate)
    up = project("up projection", x, "hidden*ffn", s.tokens_ffn, "ffn")
    gated = ops.multiply(ledger, activated, up, "gated")
    ledger.drop(activated, up)
    out = project("down projection", gated, "hidden*ffn", s.tokens_hidden, "hidden")
    ledger.drop(gated)
    return out


# -- GPT-2 -------------------------------------------------------------------------------------------


def gpt2_block(ledger, s, x):
    """``GPT2Block.forward``."""
    normed = ops.layer_norm(ledger, x, Parameter("hidden"), Parameter("hidden"), "tokens", "first norm")
    attended, weights = gpt2_attention(ledger, s, normed)
    middle = ops.add(ledger, x, attended, "residual after attention")
    ledger.drop(normed)

    normed = ops.layer_norm(ledger, middle, Parameter("hidden"), Parameter("hidden"), "tokens", "second norm")
    fed = gpt2_mlp(ledger, s, normed)
    out = ops.add(ledger, middle, fed, "residual after the MLP")
    ledger.drop(normed, middle, attended, fed, *weights)
    return out


def gpt2_attention(ledger, s, x):
    """``GPT2Attention.forward``: one product for queries, keys and values; then views of it."""
    fused = ops.linear(
        ledger,
        x,
        Parameter("3*hidden*hidden"),
        "3*tokens*hidden",
        s.stream,
        "qkv projection",
        bias=Parameter("3*hidden"),
    )
    attend = gpt2_eager_attention if s.attention == "eager" else gpt2_fused_attention
    attended, weights = attend(ledger, s, fused)
    weight, bias = Parameter("hidden*hidden"), Parameter("hidden")
    out = ops.linear(ledger, attended, weight, s.tokens_hidden, s.stream, "output projection", bias=bias)
    out = _dropped(ledger, s.residual_dropout, out, "residual dropout")
    ledger.drop(attended, fused)
    return out, weights


def gpt2_fused_attention(ledger, s, fused):
    """The fused kernel on views of the projection; backward joins the three gradients (``cat``)."""
    out = ledger.new(s.tokens_query, COMPUTE, "attention: output")
    log_sum_exp = ledger.new(s.head_rows, FLOAT32, "attention: log-sum-exp")

    def backward(gradient):
        parts = [ledger.new(s.tokens_query, COMPUTE, "attention (backward): gradients") for _ in range(3)]
        workspace = [
            ledger.new(s.tokens_query, FLOAT32, "attention (backward): workspace"),
            ledger.new(s.head_rows, FLOAT32, "attention (backward): workspace"),
        ]
        ledger.drop(*workspace)
        joined = ledger.new("3*tokens*hidden", COMPUTE, "attention (backward): joined gradient")
        ledger.drop(*parts)
        return [joined]

    ledger.record(out, [fused], ledger.save(fused, out, log_sum_exp), backward)
    ledger.drop(log_sum_exp)
    return out, ()


def gpt2_eager_attention(ledger, s, fused):
    """``eager_attention_forward`` of modeling_gpt2.py: softmax in the scores' own type, then dropout."""
    query, key, value = _split(ledger, s, fused)
    query_heads = ops.head_major(ledger, query, s, "queries by head")
    key_heads = ops.head_major(ledger, key, s, "keys by head")
    masked = _masked_scores(ledger, s, query_heads, key_heads)
    weights = ops.softmax(ledger, masked, "softmax")
    ledger.drop(masked)
    narrow = ops.cast(ledger, weights, COMPUTE, "attention weights to bfloat16")
    ledger.drop(weights)
    narrow = _dropped(ledger, s.attention_dropout, narrow, "attention dropout")
    value_heads = ops.head_major(ledger, value, s, "values by head")
    out = _weighted_values(ledger, s, ledger.keep(narrow), value_heads)
    ledger.drop(query, key, value)
    return out, (narrow,)


def _split(ledger, s, fused):
    """Views of the joint projection, and one gradient for it when all three have come back."""
    parts = []

    def collect(gradient):
        parts.append(ledger.keep(gradient))
        return []

    def join(gradient):
        parts.append(ledger.keep(gradient))
        joined = ledger.new("3*tokens*hidden", COMPUTE, "attention (backward): joined gradient")
        ledger.drop(*parts)
        return [joined]

    back_to_rows = "attention (backward): gradient back to rows"
    query, key, value = (ledger.view(fused, s.tokens_query) for _ in range(3))
    # Nodes run last one first: the queries' is the last to come back.
    ledger.record(query, [fused], (), join, relayout=back_to_rows)
    ledger.record(key, [], (), collect)
    ledger.record(value, [], (), collect, relayout=back_to_rows)
    return query, key, value


def gpt2_mlp(ledger, s, x):
    """``GPT2MLP.forward``."""
    up = ops.linear(ledger, x, Parameter("hidden*ffn"), s.tokens_ffn, s.stream, "up projection", bias=Parameter("ffn"))
    activated = ops.gelu_tanh(ledger, up, s.stream, "gelu")
    ledger.drop(up)
    out = ops.linear(
        ledger,
        activated,
        Parameter("hidden*ffn"),
        s.tokens_hidden,
        s.stream,
        "down projection",
        bias=Parameter("hidden"),
    )
    ledger.drop(activated)
    return _dropped(ledger, s.residual_dropout, out, "MLP dropout")


# -- Before the first layer and after the last -------------------------------------------------------


def embed(ledger, s):
    """The model's ``forward`` before its layers; returns the first hidden state.

    What Python keeps till the logits is never dropped here: the embeddings and the causal mask. (The rotary tables,
    which backward needs too, are added in utils.memory.)
    """
    if s.gpt2:
        ledger.new(s.tokens_hidden, s.stream, "token embeddings")
        ledger.new("seq*hidden", s.stream, "position embeddings")
        x = ledger.new(s.tokens_hidden, s.stream, "sum of the embeddings")
    else:
        x = ledger.new(s.tokens_hidden, s.stream, "token embeddings")
        ledger.keep(x)  # inputs_embeds
    if s.attention == "eager":
        boolean = ledger.new("batch*seq*seq", 1, "causal mask, as booleans")
        ledger.new("batch*seq*seq", s.stream, "causal mask")
        ledger.drop(boolean)
    return _dropped(ledger, s.gpt2 and s.embedding_dropout, x, "embedding dropout")


def embedding_backward(ledger, s, gradient, token_table, position_table):
    """Gradients of the embedding tables, dense and as large as the tables (Embedding.cu)."""
    if s.gpt2 and s.embedding_dropout:
        scaled = ledger.new(s.tokens_hidden, s.stream, "embedding dropout (backward)")
        ledger.drop(gradient)
        gradient = scaled
    if s.gpt2:
        summed = ledger.new("seq*hidden", s.stream, "position embeddings (backward): sum over the batch")
        ledger.deliver(position_table, ledger.new(position_table.dims, s.stream, "position table gradient"))
        ledger.drop(summed)
    table = ledger.new(token_table.dims, s.stream, "embedding table gradient")
    ledger.drop(ledger.new("segments*hidden", FLOAT32, "embedding table gradient: partial sums by segment"))
    ledger.drop(gradient)
    ledger.deliver(token_table, table)


def final_norm(ledger, s, x):
    """The norm after the last layer, still inside the model's ``forward``."""
    if s.gpt2:
        return ops.layer_norm(ledger, x, Parameter("hidden"), Parameter("hidden"), "tokens", "final norm")
    return ops.rms_norm(ledger, x, Parameter("hidden"), "tokens", s.stream, "final norm")


def head(ledger, s, normed, head_weight):
    """Logits and loss; returns the log-probabilities, from which backward starts.

    ``ForCausalLMLoss`` casts the logits to float32, ``cross_entropy`` makes log-probabilities of the
    same size and saves them; the caller's ``outputs`` keeps the logits themselves.
    """
    logits = ops.linear(ledger, normed, head_weight, s.tokens_vocab, s.stream, "logits")
    wide = ops.cast(ledger, logits, FLOAT32, "logits to float32")
    log_probabilities = ledger.new(s.tokens_vocab, FLOAT32, "log-probabilities")

    def backward(gradient):
        from_nll = ledger.new(s.tokens_vocab, FLOAT32, "loss (backward): gradient of the log-probabilities")
        to_logits = ledger.new(s.tokens_vocab, FLOAT32, "loss (backward): gradient of the logits")
        ledger.drop(from_nll)
        return [to_logits]

    ledger.record(log_probabilities, [wide], ledger.save(log_probabilities), backward)
    ledger.drop(wide, log_probabilities, normed)
    return log_probabilities
