"""The forecast against recorded steps, against a step that runs here, and against itself."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import json
import statistics
import subprocess
import sys

import pytest

from utils import cuda_memory, launch, models, records, report
from utils.memory import forecast
from utils.setups import SetupError, TrainingSetup

GOOD = {"model": "llama-3.2-1b", "seq_len": 4096, "micro_batch": 1}


def setup(**changes) -> TrainingSetup:
    return TrainingSetup.from_dict({**GOOD, **changes})


# ---- against the records


@pytest.fixture(scope="module")
def comparisons():
    return report.compare(records.read("training-step"))


def test_forecasts_agree_with_every_recorded_step(comparisons):
    summary = report.summary(comparisons)
    assert summary.rows >= 40
    assert summary.median_error <= 0.01
    assert summary.worst_error <= 0.04
    assert summary.phases_right >= 0.95


def test_the_records_are_broad_enough_to_mean_something(comparisons):
    setups = [comparison.setup for comparison in comparisons]
    assert len({setup.model for setup in setups}) >= 6
    assert {setup.optimizer for setup in setups} == {"adamw", "adamw-single", "adamw-fused", "adamw-8bit", "sgd"}
    assert {(setup.precision, setup.attention, setup.checkpointing) for setup in setups} >= set(
        itertools.product(["bf16"], ["eager", "sdpa"], ["none", "full"])
    ) | {("fp32-autocast", "sdpa", "none"), ("fp32-autocast", "sdpa", "full")}
    assert min(setup.seq_len for setup in setups) <= 512 and max(setup.seq_len for setup in setups) >= 32768
    assert {comparison.measured_phase for comparison in comparisons} >= {"backward", "step"}


def test_what_ran_out_of_memory_was_forecast_to():
    out_of_memory = [
        records.setup_of(run["peak"])
        for run in records.latest_runs(records.read("training-step"))
        if run["peak"].status == "oom"
    ]
    assert out_of_memory
    for setup in out_of_memory:
        assert forecast(setup).device_bytes > 139.8 * 2**30, setup


def test_the_measured_constants_are_those_of_the_records():
    runs = [run for run in records.latest_runs(records.read("training-step")) if run["peak"].status == "ok"]
    ratios = [run["reserved"].median / run["peak"].median for run in runs]
    assert pytest.approx(statistics.median(ratios), abs=0.01) == cuda_memory.RESERVED_OVER_ALLOCATED
    contexts = [run["device"].median - run["reserved"].median for run in runs]
    assert statistics.median(contexts) == cuda_memory.CONTEXT_BYTES
    assert max(contexts) - min(contexts) <= 16 * 2**20


# ---- against a step that runs here

LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama, tied, no groups": {"model_type": "llama", **LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama, small vocabulary": {"model_type": "llama", **LLAMA, "vocab_size": 64, "intermediate_size": 1024},
    "llama, one key head": {"model_type": "llama", **LLAMA, "num_key_value_heads": 1},
    "llama, biased": {"model_type": "llama", **LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral, wide heads": {"model_type": "mistral", **LLAMA, "head_dim": 64, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA},
}
CASES = [
    {"config": "llama", "attention": "eager"},
    {"config": "llama", "attention": "eager", "micro_batch": 1},
    {"config": "llama", "attention": "sdpa", "gradient_accumulation": 2},
    {"config": "llama", "attention": "eager", "checkpointing": "full"},
    {"config": "llama", "attention": "sdpa", "precision": "fp32-autocast"},
    {"config": "llama", "attention": "eager", "precision": "fp32-autocast", "checkpointing": "full"},
    {"config": "llama, tied, no groups", "attention": "eager", "precision": "fp32-autocast"},
    {"config": "llama, tied, no groups", "attention": "eager", "micro_batch": 1},
    {"config": "llama, tied, no groups", "attention": "sdpa", "gradient_accumulation": 2, "checkpointing": "full"},
    {"config": "llama, small vocabulary", "attention": "sdpa"},
    {"config": "llama, small vocabulary", "attention": "sdpa", "checkpointing": "full"},
    {"config": "llama, small vocabulary", "attention": "eager", "checkpointing": "full"},
    {"config": "llama, one key head", "attention": "eager", "micro_batch": 1},
    {"config": "llama, one key head", "attention": "eager"},
    {"config": "llama, biased", "attention": "sdpa", "micro_batch": 4},
    {"config": "mistral, wide heads", "attention": "eager", "checkpointing": "full", "gradient_accumulation": 2},
    {"config": "qwen2", "attention": "eager"},
    {"config": "qwen3", "attention": "sdpa"},
    {"config": "qwen3", "attention": "eager", "precision": "fp32-autocast"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_a_real_step_holds_what_the_forecast_says(case, tmp_path, monkeypatch):
    """The same code on the CPU, its live tensors counted: what no kernel keeps to itself must agree."""
    pytest.importorskip("torch")
    from utils.workers import training_step

    monkeypatch.setattr(launch, "emit", lambda *arguments, **fields: None)
    case = {"seq_len": 128, "micro_batch": 2, **case}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[case.pop("config")]))
    setup = TrainingSetup.from_dict({"model": str(path), "optimizer": "sgd", **case})
    measured = training_step.measure(setup, "cpu")
    expected = forecast(setup)
    not_tensors = expected.terms["matmul_workspaces"]
    # Half a per mille: a few scalars, and blocks of 512 bytes that only the allocator makes.
    for phase in ("forward", "backward"):
        assert expected.phases[phase] - not_tensors == pytest.approx(measured[f"peak_{phase}"]["median"], rel=5e-4)
    assert expected.held_bytes - not_tensors == pytest.approx(measured["held"]["median"], rel=5e-3)


# ---- against itself

VARIANTS = [
    dict(zip(("precision", "attention", "checkpointing", "optimizer", "gradient_accumulation"), values, strict=True))
    for values in itertools.product(
        ["bf16", "fp32-autocast"], ["eager", "sdpa"], ["none", "full"], ["adamw", "adamw-8bit", "sgd"], [1, 4]
    )
]


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-2-7b", "qwen2.5-0.5b", "qwen3-1.7b", "gpt2-1.5b"])
def test_terms_add_up_to_the_peak_and_the_peak_is_a_phase(model):
    for variant in VARIANTS:
        result = forecast(setup(model=model, seq_len=1024, **variant))
        assert sum(result.terms.values()) == result.peak_bytes == max(result.phases.values())
        assert result.phases[result.peak_phase] == result.peak_bytes
        assert result.instant.startswith(result.peak_phase)
        assert result.held_bytes < result.peak_bytes < result.reserved_bytes < result.device_bytes
        assert all(type(n_bytes) is int and n_bytes > 0 for n_bytes in result.terms.values())
        assert json.loads(json.dumps(result.to_dict())) == result.to_dict()


def test_memory_does_not_grow_with_accumulation_beyond_two():
    two, eight = (forecast(setup(gradient_accumulation=steps)) for steps in (2, 8))
    assert two == eight
    assert two.peak_bytes > forecast(setup()).peak_bytes


def test_memory_is_linear_in_the_micro_batch():
    # Two and more: a single sequence needs fewer copies with eager attention.
    phases = [forecast(setup(micro_batch=batch)).phases["backward"] for batch in (2, 3, 4)]
    assert phases[2] - phases[1] == pytest.approx(phases[1] - phases[0], rel=2e-3)


def test_memory_is_linear_in_the_sequence_with_sdpa_and_quadratic_with_eager():
    def second_difference(attention):
        low, middle, high = (
            forecast(setup(seq_len=length, attention=attention)).phases["backward"] for length in (4096, 8192, 12288)
        )
        return (high - middle) - (middle - low)

    layers, heads = 16, 32
    bytes_a_score = second_difference("eager") / (heads * 2 * 4096**2)
    # Every layer keeps 6 bytes a score; the last one, at the start of its backward pass, up to 16 more.
    assert 6 * layers <= bytes_a_score <= 6 * layers + 16
    assert abs(second_difference("sdpa")) < 0.001 * second_difference("eager")


def test_checkpointing_keeps_one_hidden_state_a_layer():
    deep = dataclasses.replace(models.get("llama-3.2-1b"), layers=64)
    shallow = dataclasses.replace(deep, layers=32)

    def at_the_end_of_forward(architecture, **variant):
        s = setup(**variant)
        object.__setattr__(s, "_architecture", architecture)
        result = forecast(s)
        return result.phases["forward"] - result.held_bytes

    def a_layer(**variant):
        return (at_the_end_of_forward(deep, **variant) - at_the_end_of_forward(shallow, **variant)) / 32

    hidden_state = 4096 * 2048
    assert a_layer(checkpointing="full") == 2 * hidden_state
    assert a_layer(checkpointing="full", precision="fp32-autocast") > 4 * hidden_state  # and the cast weights
    assert a_layer() > 20 * hidden_state


def test_what_is_not_modelled_yet_says_so():
    with pytest.raises(SetupError) as caught:
        forecast(setup(zero_stage=2, world_size=8, liger=True, precision="bf16-master", attention="flash"))
    assert [line.split(":")[0] for line in caught.value.errors] == [
        "world_size", "zero_stage", "precision", "attention", "liger",
    ]  # fmt: skip
    assert all("no forecast yet" in line for line in caught.value.errors)


def test_a_sliding_window_that_matters_is_not_modelled_for_sdpa(tmp_path):
    config = {**models.get("mistral-7b").hf_config(), "sliding_window": 4096}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    forecast(setup(model=str(path), seq_len=4095))
    forecast(setup(model=str(path), seq_len=8192, attention="eager"))
    for seq_len in (4096, 8192):  # transformers makes a mask from the window's own length on
        with pytest.raises(SetupError, match="sliding window"):
            forecast(setup(model=str(path), seq_len=seq_len))


def test_doctests():
    assert doctest.testmod(cuda_memory).failed == 0


def test_the_arithmetic_needs_nothing_but_the_standard_library():
    code = (
        "import sys; from utils.memory import forecast; from utils.setups import TrainingSetup;"
        "forecast(TrainingSetup(model='llama-3.1-8b', seq_len=4096, micro_batch=1));"
        "print([m for m in ('torch', 'numpy', 'pandas', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=records.ROOT, check=True)
    assert answer.stdout == "[]\n"
