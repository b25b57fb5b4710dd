"""A setup is checked once, completely, and reads back as it was written."""

from __future__ import annotations

import json

import pytest

from utils.setups import SetupError, TrainingSetup

GOOD = {"model": "llama-3.2-1b", "seq_len": 4096, "micro_batch": 1}


def errors(**changes) -> list[str]:
    values = {**GOOD, **changes}
    with pytest.raises(SetupError) as caught:
        TrainingSetup.from_dict({name: value for name, value in values.items() if value is not ...})
    assert all("\n" not in line for line in caught.value.errors)
    return caught.value.errors


def test_defaults_are_the_documented_ones():
    assert TrainingSetup.from_dict(GOOD).to_dict() == {
        **GOOD,
        "gradient_accumulation": 1,
        "world_size": 1,
        "zero_stage": None,
        "offload_optimizer": "none",
        "offload_parameters": "none",
        "precision": "bf16",
        "attention": "sdpa",
        "checkpointing": "none",
        "liger": False,
        "optimizer": "adamw",
        "reduce_bucket_elements": 500_000_000,
        "method": "full",
        "lora_rank": None,
        "lora_targets": None,
    }


def test_canonical_form_reads_back_and_does_not_depend_on_order():
    setup = TrainingSetup.from_dict({**GOOD, "method": "lora", "lora_rank": 8, "lora_targets": ["q_proj", "v_proj"]})
    assert TrainingSetup.from_json(setup.canonical()) == setup
    backwards = dict(reversed(list(setup.to_dict().items())))
    assert TrainingSetup.from_dict(backwards).canonical() == setup.canonical()
    assert "\n" not in setup.canonical() and hash(setup) == hash(TrainingSetup.from_json(setup.canonical()))


@pytest.mark.parametrize("name", ["seq_len", "micro_batch", "gradient_accumulation", "world_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4096", None, True, float("nan"), float("inf"), 2**60, [1]])
def test_a_size_is_a_whole_number_from_one(name, value):
    (line,) = errors(**{name: value})
    assert line.startswith(f"{name}: {value!r} ") and "whole number" in line


def test_a_whole_number_may_be_written_as_a_float():
    setup = TrainingSetup.from_json('{"model": "llama-3.2-1b", "seq_len": 4e3, "micro_batch": 1.0}')
    assert (setup.seq_len, setup.micro_batch) == (4000, 1)
    assert isinstance(setup.seq_len, int)


@pytest.mark.parametrize(
    "name",
    ["precision", "attention", "checkpointing", "optimizer", "method", "offload_optimizer", "offload_parameters"],
)
@pytest.mark.parametrize("value", ["ful", "", None, 1, ["full"], {}])
def test_a_choice_names_what_is_allowed(name, value):
    (line,) = errors(**{name: value})
    assert line.startswith(f"{name}: {value!r} is not allowed; one of ")


def test_a_choice_suggests_the_nearest():
    assert errors(optimizer="adamw8bit")[0].endswith("; did you mean adamw-8bit or adamw?")
    assert errors(attention="Sdpa")[0].endswith("; did you mean sdpa?")


@pytest.mark.parametrize("value", [4, -1, "2", 1.5, True])
def test_zero_stage(value):
    assert errors(zero_stage=value) == [f"zero_stage: {value!r} is not allowed; null (plain PyTorch), 0, 1, 2 or 3"]


def test_every_problem_is_named_at_once():
    lines = errors(model="lama-3.2-1b", seq_len=0, liger="yes", optimiser="sgd", micro_batch=...)
    assert [line.split(":")[0] for line in lines] == ["optimiser", "micro_batch", "seq_len", "liger", "model"]
    assert "did you mean optimizer" in lines[0]
    assert "missing" in lines[1]
    assert "did you mean llama-3.2-1b" in lines[-1]


def test_fields_that_exclude_each_other():
    needs = "offload_optimizer: 'cpu' needs DeepSpeed with zero_stage 1, 2 or 3"
    assert errors(offload_optimizer="cpu") == errors(offload_optimizer="cpu", zero_stage=0) == [needs]
    needs = "offload_parameters: 'cpu' needs DeepSpeed with zero_stage 3"
    assert errors(offload_parameters="cpu") == errors(offload_parameters="cpu", zero_stage=2) == [needs]
    assert errors(lora_rank=8) == ["lora_rank: 8 is not allowed with method 'full'; lora or qlora"]
    assert [line.split(":")[0] for line in errors(method="lora")] == ["lora_rank", "lora_targets"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "null", '{"model": }'])
def test_what_is_not_a_json_object_is_one_line(text):
    with pytest.raises(SetupError) as caught:
        TrainingSetup.from_json(text)
    assert len(caught.value.errors) == 1 and caught.value.errors[0].startswith("setup: ")


def test_a_sequence_beyond_the_model_is_a_warning():
    assert not TrainingSetup.from_dict(GOOD).warnings
    (line,) = TrainingSetup.from_dict({**GOOD, "seq_len": 200_000}).warnings
    assert "200000" in line and "131072" in line
    (line,) = TrainingSetup.from_dict({**GOOD, "model": "gpt2-1.5b", "seq_len": 2048}).warnings
    assert "1024" in line and "would fail" in line


def test_a_model_may_be_a_file(tmp_path):
    from utils import models

    path = tmp_path / "config.json"
    path.write_text(json.dumps(models.get("llama-3.2-1b").hf_config()))
    for given in (str(path), str(tmp_path)):
        assert TrainingSetup.from_dict({**GOOD, "model": given}).architecture.parameters == 1_235_814_400
