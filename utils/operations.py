"""What each PyTorch operation of a training step allocates, saves and frees.

Every function takes a :class:`~utils.ledger.Ledger` and tensors of it, and plays one operation: the
forward allocations at once, the backward ones when the ledger runs backward. Read them beside
tools/autograd/derivatives.yaml (what is saved, which gradients are made) and torch/csrc/autograd/
FunctionsManual.cpp (the temporaries of each gradient).

Dimensions are names: ``tokens*hidden`` is micro-batch x sequence x hidden size. The second half of a
size is the bytes an element. Matrix products always run in bfloat16 here; ``stream`` is the type of the
residual stream: 2 where the model is bfloat16, 4 where it is float32 under autocast.
"""

from __future__ import annotations

COMPUTE = 2  # bytes an element of a matrix product's operands: bfloat16
FLOAT32 = 4


def cast(ledger, x, itemsize, name):
    """``x.to(dtype)``: nothing if ``x`` has the type already. Backward casts the gradient back."""
    if x.size[1] == itemsize:
        return ledger.keep(x)
    dims, old = x.size
    out = ledger.new(dims, itemsize, name)

    def backward(gradient):
        return [ledger.new(dims, old, name + " (backward)")]

    return ledger.record(out, [x], (), backward)


def add(ledger, x, branch, name):
    """The residual addition. Saves nothing and hands one gradient to both inputs.

    Where the branch is narrower than the stream, its gradient is cast (``validate_outputs`` in
    torch/csrc/autograd/engine.cpp).
    """
    dims, stream = x.size
    narrow = branch.size[1]
    out = ledger.new(dims, stream, name)

    def backward(gradient):
        if narrow == stream:
            to_branch = ledger.keep(gradient)
        else:
            to_branch = ledger.new(dims, narrow, name + " (backward): cast for the branch")
        return [ledger.keep(gradient), to_branch]

    return ledger.record(out, [x, branch], (), backward)


def linear(ledger, x, weight, out_dims, stream, name, *, bias=None, rows="tokens", relayout=False):
    """``x @ W (+ b)``. Saves ``x`` and ``W`` in the compute type.

    Without a bias (mm) backward makes the weight's gradient first, with one (addmm) the input's; the
    bias's gradient is a sum over the rows. Under autocast (``stream`` 4) ``x`` is cast for each product
    anew, and the weight once: its copy is cached until the autocast context ends.

    ``relayout``: the gradient arrives with the heads outside and is copied back to rows first.
    """
    weight_operand = weight
    cast_copy = None
    if stream != COMPUTE:
        cast_copy = _autocast_weight(ledger, weight, name)
        weight_operand = cast_copy
    operand = cast(ledger, x, COMPUTE, name + ": input to bfloat16")
    in_dims = operand.size[0]
    saved = ledger.save(operand) if cast_copy is None else ledger.save(operand, cast_copy)
    out = ledger.new(out_dims, COMPUTE, name)

    def backward(gradient):
        def make(dims, what):
            made = ledger.new(dims, COMPUTE, name + " (backward): " + what)
            made.is_view = True
            return made

        if bias is None:
            to_weight = make(weight.dims, "weight gradient")
            to_input = make(in_dims, "input gradient")
        else:
            to_input = make(in_dims, "input gradient")
            to_weight = make(weight.dims, "weight gradient")
            to_bias = row_sum(ledger, bias, COMPUTE, rows, name + " (backward): bias gradient")
            ledger.deliver(bias, to_bias)
        return [to_input, to_weight]

    copy = name + " (backward): gradient back to rows" if relayout else None
    ledger.record(out, [operand, weight_operand], saved, backward, relayout=copy)
    ledger.drop(operand)
    if cast_copy is not None:
        ledger.drop(cast_copy)
    return out


def _autocast_weight(ledger, weight, name):
    out = ledger.new(weight.dims, COMPUTE, name + ": autocast copy of the weight")
    ledger.cache(out)

    def backward(gradient):
        return [ledger.new(weight.dims, FLOAT32, name + " (backward): weight gradient to float32")]

    return ledger.record(out, [weight], (), backward)


def row_sum(ledger, parameter, itemsize, rows, name):
    """A sum over ``rows``, as for the gradient of a bias or of a norm's weight.

    Where the rows are many, PyTorch splits them over thread blocks and adds the partial sums through a
    buffer in device memory (aten/src/ATen/native/cuda/Reduce.cuh; size in ``utils.cuda_memory.partial_sums``).
    """
    out = ledger.new(parameter.dims, itemsize, name)
    ledger.drop(ledger.new(f"partial sums: {parameter.dims} over {rows}", FLOAT32, name + ", partial sums"))
    return out


def rms_norm(ledger, x, weight, rows, stream, name):
    """``LlamaRMSNorm.forward``: to float32, mean square, scale, back, times the weight.

    Saved: the float32 copy (by ``pow`` and by the product), one statistic a row, and the normalised
    rows in the input's type (by the product with the weight). The weight has the stream's type, and so
    has the output.
    """
    dims, narrow = x.size
    wide = cast(ledger, x, FLOAT32, name + ": input to float32")
    squares = ledger.new(dims, FLOAT32, name + ": squares")
    statistics = ledger.new(rows, FLOAT32, name + ": statistics")
    ledger.drop(squares)

    def mean_square_backward(gradient):
        spread = ledger.new(dims, FLOAT32, name + " (backward): gradient of the mean")
        power = ledger.new(dims, FLOAT32, name + " (backward): x to the first power")
        doubled = ledger.new(dims, FLOAT32, name + " (backward): twice x")
        out = ledger.new(dims, FLOAT32, name + " (backward): gradient of the squares")
        ledger.drop(doubled, power, spread)
        return [out]

    ledger.record(statistics, [wide], ledger.save(wide, statistics), mean_square_backward)
    scaled = ledger.new(dims, FLOAT32, name + ": x / rms(x)")

    def scale_backward(gradient):
        products = ledger.new(dims, FLOAT32, name + " (backward): gradient times x")
        to_wide = ledger.new(dims, FLOAT32, name + " (backward): gradient times statistics")
        to_statistics = ledger.new(rows, FLOAT32, name + " (backward): gradient of the statistics")
        ledger.drop(products)
        return [to_wide, to_statistics]

    ledger.record(scaled, [wide, statistics], ledger.save(wide, statistics), scale_backward)
    normalised = cast(ledger, scaled, narrow, name + ": normalised, in the input's type")
    out = ledger.new(dims, stream, name + ": output")

    def weight_backward(gradient):
        to_normalised = ledger.new(dims, stream, name + " (backward): gradient times weight")
        if narrow != stream:
            wide, to_normalised = to_normalised, ledger.new(dims, narrow, name + " (backward): cast")
            ledger.drop(wide)
        products = ledger.new(dims, stream, name + " (backward): gradient times normalised")
        to_weight = row_sum(ledger, weight, stream, rows, name + " (backward): weight gradient")
        ledger.drop(products)
        return [to_normalised, to_weight]

    ledger.record(out, [normalised, weight], ledger.save(normalised), weight_backward)
    ledger.drop(normalised, scaled, wide, statistics)
    return out


def layer_norm(ledger, x, weight, bias, rows, name):
    """``nn.LayerNorm``, one kernel: saves its input as it is and two statistics a row."""
    dims, stream = x.size
    out = ledger.new(dims, stream, name + ": output")
    mean = ledger.new(rows, FLOAT32, name + ": mean")
    deviation = ledger.new(rows, FLOAT32, name + ": deviation")

    def backward(gradient):
        to_x = ledger.new(dims, stream, name + " (backward): input gradient")
        ledger.deliver(bias, ledger.new(bias.dims, stream, name + " (backward): bias gradient"))
        return [to_x, ledger.new(weight.dims, stream, name + " (backward): weight gradient")]

    ledger.record(out, [x, weight], ledger.save(x, mean, deviation), backward)
    ledger.drop(mean, deviation)
    return out


def dropout(ledger, x, name):
    """``nn.Dropout`` in training, one kernel: saves a mask of one byte an element."""
    dims, itemsize = x.size
    mask = ledger.new(dims, 1, name + ": mask")
    out = ledger.new(dims, itemsize, name + ": output")

    def backward(gradient):
        return [ledger.new(dims, itemsize, name + " (backward)")]

    ledger.record(out, [x], ledger.save(mask), backward)
    ledger.drop(mask)
    return out


def rotary(ledger, x, half_dims, stream, name):
    """``x * cos + rotate_half(x) * sin``, for the queries or the keys. Saves only the tables.

    The tables have the stream's type, so under autocast the result is float32.
    """
    dims, narrow = x.size
    by_cos = ledger.new(dims, stream, name + ": times cos")
    negated = ledger.new(half_dims, narrow, name + ": minus the second half")
    rotated = ledger.new(dims, narrow, name + ": rotated")
    ledger.drop(negated)
    by_sin = ledger.new(dims, stream, name + ": times sin")
    ledger.drop(rotated)
    out = ledger.new(dims, stream, name + ": output")
    ledger.drop(by_cos, by_sin)

    def product(what):
        made = ledger.new(dims, stream, name + " (backward): times " + what)
        if stream == narrow:
            return made
        cast_product = ledger.new(dims, narrow, name + " (backward): cast")
        ledger.drop(made)
        return cast_product

    def backward(gradient):
        by_sin = product("sin")
        negated = ledger.new(half_dims, narrow, name + " (backward): minus the first half")
        total = ledger.new(dims, narrow, name + " (backward): first half in its place")
        ledger.drop(negated)
        second = ledger.new(dims, narrow, name + " (backward): second half in its place")
        ledger.drop(by_sin, second)
        ledger.drop(product("cos"))
        return [total]

    return ledger.record(out, [x], (), backward)


def fused_attention(ledger, q, k, v, dims, name):
    """``scaled_dot_product_attention`` through a fused kernel (cuDNN or FlashAttention).

    Saves queries, keys, values, the output and the log-sum-exp, one float32 a head and token; the
    scores never exist. Backward accumulates the queries' gradient in float32 and, where several query
    heads share a key head, makes the keys' and values' gradients for each query head before it adds
    them (aten/src/ATen/native/cudnn/MHA.cpp and transformers/cuda/flash_attn/flash_api.cpp).
    """
    q = cast(ledger, q, COMPUTE, name + ": queries to bfloat16")
    k = cast(ledger, k, COMPUTE, name + ": keys to bfloat16")
    out = ledger.new(dims.tokens_query, COMPUTE, name + ": output")
    log_sum_exp = ledger.new(dims.head_rows, FLOAT32, name + ": log-sum-exp")

    def backward(gradient):
        to_q = ledger.new(dims.tokens_query, COMPUTE, name + " (backward): query gradient")
        to_k = ledger.new(dims.tokens_kv, COMPUTE, name + " (backward): key gradient")
        to_v = ledger.new(dims.tokens_kv, COMPUTE, name + " (backward): value gradient")
        workspace = [ledger.new(dims.tokens_query, FLOAT32, name + " (backward): workspace")]
        workspace.append(ledger.new(dims.head_rows, FLOAT32, name + " (backward): workspace"))
        if dims.grouped:
            for _ in range(2):
                workspace.append(ledger.new(dims.tokens_query, COMPUTE, name + " (backward): workspace"))
        ledger.drop(*workspace)
        return [to_q, to_k, to_v]

    ledger.record(out, [q, k, v], ledger.save(q, k, v, out, log_sum_exp), backward)
    ledger.drop(q, k, log_sum_exp)
    return out


def repeat_kv(ledger, x, dims, name):
    """``repeat_kv``: a copy of the keys or values for every query head that shares them.

    One key head of one sequence is expanded without a copy.
    """
    if not dims.grouped:
        return ledger.keep(x)
    kv_dims, itemsize = x.size
    if dims.one_key_head and dims.one_sequence:
        out = ledger.view(x, dims.tokens_query)
    else:
        out = ledger.new(dims.tokens_query, itemsize, name)

    def backward(gradient):
        return [ledger.new(kv_dims, itemsize, name + " (backward): sum over the group")]

    return ledger.record(out, [x], (), backward)


def head_major(ledger, x, dims, name):
    """The copy that ``bmm`` needs of ``[batch, heads, ...]`` kept token by token; none for one sequence."""
    if dims.one_sequence:
        return ledger.keep(x)
    out = ledger.new(*x.size, name)

    def backward(gradient):
        return [ledger.keep(gradient)]

    return ledger.record(out, [x], (), backward)


def batched_product(ledger, a, b, out_dims, name, relayout=None):
    """``torch.matmul`` of two batched operands. Saves both; the second one's gradient comes first."""
    out = ledger.new(out_dims, COMPUTE, name)
    a_dims, b_dims = a.size[0], b.size[0]

    def backward(gradient):
        to_b = ledger.new(b_dims, COMPUTE, name + " (backward): gradient of the second operand")
        to_a = ledger.new(a_dims, COMPUTE, name + " (backward): gradient of the first operand")
        return [to_a, to_b]

    return ledger.record(out, [a, b], ledger.save(a, b), backward, relayout=relayout)


def scale(ledger, x, name):
    """Multiply by a number. Saves nothing."""
    dims, itemsize = x.size
    out = ledger.new(dims, itemsize, name)

    def backward(gradient):
        return [ledger.new(dims, itemsize, name + " (backward)")]

    return ledger.record(out, [x], (), backward)


def add_mask(ledger, x, stream, name):
    """``scores + mask``: the mask has the stream's type, and the sum the wider of the two."""
    dims, narrow = x.size
    out = ledger.new(dims, stream, name)

    def backward(gradient):
        if narrow == stream:
            return [ledger.keep(gradient)]
        return [ledger.new(dims, narrow, name + " (backward): cast")]

    return ledger.record(out, [x], (), backward)


def softmax(ledger, x, name):
    """``softmax``. Saves its result; the gradient needs a product of the same size beside it."""
    dims, itemsize = x.size
    out = ledger.new(dims, itemsize, name)

    def backward(gradient):
        to_x = ledger.new(dims, itemsize, name + " (backward)")
        ledger.drop(ledger.new(dims, itemsize, name + " (backward): gradient times output"))
        return [to_x]

    return ledger.record(out, [x], ledger.save(out), backward)


def silu(ledger, x, name):
    """``F.silu``. Saves its input."""
    dims, itemsize = x.size
    out = ledger.new(dims, itemsize, name)

    def backward(gradient):
        return [ledger.new(dims, itemsize, name + " (backward)")]

    return ledger.record(out, [x], ledger.save(x), backward)


def multiply(ledger, a, b, name):
    """``a * b``. Saves both."""
    dims, itemsize = a.size
    out = ledger.new(dims, itemsize, name)

    def backward(gradient):
        return [
            ledger.new(dims, itemsize, name + " (backward): gradient of the first factor"),
            ledger.new(dims, itemsize, name + " (backward): gradient of the second factor"),
        ]

    return ledger.record(out, [a, b], ledger.save(a, b), backward)


def gelu_tanh(ledger, x, stream, name):
    """``NewGELUActivation``: ``0.5 x (1 + tanh(c (x + 0.044715 x^3)))``, eight kernels in Python.

    Saved: x (by ``pow``; autocast runs ``pow`` in float32, so a cast copy there), half of x, tanh, and
    one plus tanh.
    """
    dims, narrow = x.size

    half = ledger.new(dims, narrow, name + ": half of x")
    base = ledger.keep(x) if narrow == stream else ledger.new(dims, stream, name + ": input of pow")
    cube = ledger.new(dims, stream, name + ": cube")
    scaled_cube = ledger.new(dims, stream, name + ": scaled cube")
    ledger.drop(cube)
    inner = ledger.new(dims, stream, name + ": inner sum")
    ledger.drop(scaled_cube)
    argument = ledger.new(dims, stream, name + ": argument of tanh")
    ledger.drop(inner)
    tanh = ledger.new(dims, stream, name + ": tanh")
    ledger.drop(argument)
    one_plus = ledger.new(dims, stream, name + ": one plus tanh")
    out = ledger.new(dims, stream, name + ": output")

    def backward(gradient):
        to_one_plus = ledger.new(dims, stream, name + " (backward): gradient of one plus tanh")
        to_half = ledger.new(dims, stream, name + " (backward): gradient of half of x")
        if narrow != stream:
            narrow_half = ledger.new(dims, narrow, name + " (backward): cast")
            ledger.drop(to_half)
            to_half = narrow_half
        to_argument = ledger.new(dims, stream, name + " (backward): tanh")
        ledger.drop(to_one_plus)
        to_inner = ledger.new(dims, stream, name + " (backward): gradient of the inner sum")
        ledger.drop(to_argument)
        total = to_inner
        if narrow != stream:
            total = ledger.new(dims, narrow, name + " (backward): cast")
        to_cube = ledger.new(dims, stream, name + " (backward): gradient of the cube")
        if narrow != stream:
            ledger.drop(to_inner)
        square = ledger.new(dims, stream, name + " (backward): square")
        tripled = ledger.new(dims, stream, name + " (backward): three squares")
        from_cube = ledger.new(dims, stream, name + " (backward): gradient through the cube")
        ledger.drop(tripled, square, to_cube)
        if narrow != stream:
            ledger.drop(ledger.new(dims, narrow, name + " (backward): cast"))
        ledger.drop(from_cube)
        ledger.drop(ledger.new(dims, narrow, name + " (backward): gradient through half of x"))
        ledger.drop(to_half)
        return [total]

    ledger.record(out, [x], ledger.save(base, half, tanh, one_plus), backward)
    ledger.drop(half, base, tanh, one_plus)
    return out
