"""The command line: results on stdout, one line a problem on stderr, exit code 2 for wrong input."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import statistics
import subprocess
import sys
import time

import pytest

from utils import __main__ as cli
from utils import hardware, memory, models, records, report
from utils.experiments import training_step
from utils.setups import TrainingSetup

SETUP = {"model": "llama-3.2-1b", "seq_len": 4096, "micro_batch": 1}


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line in this process; returns exit code, stdout, stderr."""

    def call(*arguments: str, stdin: str | bytes = ""):
        stdin = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(run):
    """Run the command line with wrong input; returns the lines on stderr."""

    def call(*arguments: str, **options) -> list[str]:
        code, out, err = run(*arguments, **options)
        assert (code, out) == (2, "")
        assert err.endswith("\n") and "Traceback" not in err
        return err[:-1].split("\n")

    return call


def process(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "utils", *arguments]
    return subprocess.run(command, cwd=records.ROOT, capture_output=True, text=True, timeout=60, **options)


# ---- starting


@pytest.mark.parametrize(
    "arguments", [["models"], ["forecast", "llama-3.1-8b", "--seq-len", "9", "--micro-batch", "1"]]
)
def test_models_and_forecast_start_at_once(arguments):
    times = [float("inf")]
    while min(times) > 0.3 and len(times) < 10:  # the best of several: a busy machine is not at fault
        start = time.perf_counter()
        assert process(*arguments).returncode == 0
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_models_and_forecast_import_the_standard_library_only():
    code = (
        "import sys; from utils.__main__ import main; main(['models']); main(['forecast', '--json', '-']);"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names, file=sys.stderr)"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, cwd=records.ROOT, capture_output=True, text=True, input=json.dumps(SETUP))
    assert done.returncode == 0
    assert set(done.stderr.split()) <= {"utils", "__main__", "__mp_main__"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "python -m utils: COMMAND: missing; one of models, forecast, measure, records, report"),
        (["forcast"], "'forcast': allowed: models, forecast, measure, records, report; did you mean forecast?"),
        (["report"], "python -m utils report: REPORT: missing; one of forecast, speed, environment"),
        (["report", "sped"], "'sped': allowed: forecast, speed, environment; did you mean speed?"),
        (["models", "--jason"], "--jason: no such option; one of --help, --json; did you mean --json?"),
        (["models", "all"], "python -m utils models: 'all' is one argument too many"),
        (
            ["measure", "training-stop"],
            "experiment: 'training-stop': allowed: training-step; did you mean training-step?",
        ),
        (["measure", "training-step", "--jobs", "0"], "--jobs: '0': a whole number, 1 or more"),
        (["measure", "training-step", "--timeout", "x"], "--timeout: 'x': a number above 0"),
        (["measure", "training-step", "--device", "tpu"], "--device: 'tpu': allowed: cuda, cpu; did you mean cpu?"),
        (["records", "add"], "the following arguments are required: FILE"),
        (["records", "add", "nowhere.csv"], "nowhere.csv: cannot be read: No such file or directory"),
        (["records", "check", "nowhere"], "nowhere: no such folder"),
    ],
)
def test_a_wrong_command_is_one_line(refused, arguments, error):
    [line] = refused(*arguments)
    assert line.endswith(error)


def test_output_cut_short_by_its_reader_is_no_error():
    command = f"{sys.executable} -m utils models --json | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=records.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[\n", "")


# ---- models


def test_models_lists_every_model_with_its_parameters(run):
    code, out, err = run("models")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["model", *models.names()]
    assert "8,030,261,248" in out
    assert [one["parameters"] for one in json.loads(run("models", "--json")[1])] == [
        models.get(name).parameters for name in models.names()
    ]


# ---- forecast


def test_forecast_json_prints_one_object_and_nothing_else(tmp_path):
    file = tmp_path / "setup.json"
    file.write_text(json.dumps(SETUP))
    done = process("forecast", "--json", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer == memory.forecast(TrainingSetup(**SETUP)).to_dict()
    for name in ("parameters", "peak_bytes", "reserved_bytes", "device_bytes", "host_bytes"):
        assert type(answer[name]) is int
    assert answer["peak_bytes"] == answer["phases"][answer["peak_phase"]] == max(answer["phases"].values())


def test_forecast_reads_stdin_also_with_a_byte_order_mark(run):
    code, out, err = run("forecast", "--json", "-", stdin=b"\xef\xbb\xbf" + json.dumps(SETUP).encode())
    assert (code, err) == (0, "")
    assert json.loads(out)["parameters"] == 1_235_814_400


def test_forecast_reads_a_config_json(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(models.get("llama-3.2-1b").hf_config()))
    expected = run("forecast", "--json", "-", stdin=json.dumps(SETUP))[1]
    for model in (tmp_path, tmp_path / "config.json"):
        code, out, err = run("forecast", "--json", "-", stdin=json.dumps({**SETUP, "model": str(model)}))
        assert (code, out, err) == (0, expected, "")


def test_a_long_sequence_is_a_warning_on_stderr(run):
    code, out, err = run("forecast", "--json", "-", stdin=json.dumps({**SETUP, "model": "llama-2-7b", "seq_len": 5000}))
    assert code == 0 and json.loads(out)["peak_bytes"]
    assert err == "warning: seq_len: 5000 is beyond the 4096 positions of llama-2-7b\n"
    assert run("forecast", "llama-2-7b", "--seq-len", "5000", "--micro-batch", "1")[::2] == (0, err)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": "lama-3.1-8b"}, ["model: 'lama-3.1-8b'"]),
        ({"model": "."}, ["model: directory '.' holds no config.json"]),
        ({"seq_len": 0}, ["seq_len: 0"]),
        ({"micro_batch": -1}, ["micro_batch: -1"]),
        ({"seq_len": 1.5}, ["seq_len: 1.5"]),
        ({"seq_len": "4096"}, ["seq_len: '4096'"]),
        ({"seq_len": True}, ["seq_len: True"]),
        ({"seq_length": 4096}, ["seq_length: unknown field"]),
        ({"optimizer": "adam"}, ["optimizer: 'adam'"]),
        (
            {"seq_len": 0, "micro_batch": None, "model": "gpt-5", "x": 1},
            ["x:", "seq_len: 0", "micro_batch: None", "model: 'gpt-5'"],
        ),
    ],
)
def test_every_problem_of_a_setup_is_one_line_with_field_and_value(refused, changes, names):
    lines = refused("forecast", "--json", "-", stdin=json.dumps({**SETUP, **changes}))
    assert len(lines) == len(names)
    for name in names:
        assert sum(line.startswith(name) for line in lines) == 1, (name, lines)


@pytest.mark.parametrize("missing", ["model", "seq_len", "micro_batch"])
def test_a_missing_field_is_named(refused, missing):
    setup = {name: value for name, value in SETUP.items() if name != missing}
    [line] = refused("forecast", "--json", "-", stdin=json.dumps(setup))
    assert line.startswith(f"{missing}: missing")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "setup.json:1: not valid JSON: Expecting value (column 1)"),
        (b'{\n"model": "gpt2-1.5b"\n"seq_len": 1}', "setup.json:3: not valid JSON: "),
        (b"[]", "setup.json: a JSON object is required"),
        (b"4096", "setup.json: a JSON object is required"),
        (b'{"seq_len": 1, "seq_len": 2}', "setup.json: not valid JSON: seq_len given more than once"),
        (b"\xff\xfe{}", "setup.json: not valid JSON: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "setup.json: not valid JSON: "),
    ],
)
def test_a_file_that_is_not_a_json_object_is_named(refused, tmp_path, content, error):
    (tmp_path / "setup.json").write_bytes(content)
    [line] = refused("forecast", "--json", str(tmp_path / "setup.json"))
    assert error in line


def test_a_file_that_cannot_be_read_is_named(refused, tmp_path):
    assert refused("forecast", "--json", "nowhere.json") == ["nowhere.json: cannot be read: No such file or directory"]
    assert refused("forecast", "--json", str(tmp_path)) == [f"{tmp_path}: cannot be read: Is a directory"]


def test_every_field_has_a_flag_that_says_the_same_as_json(run):
    """One flag a field of TrainingSetup, whatever its type."""
    values = {
        "seq_len": 1000, "micro_batch": 2, "gradient_accumulation": 4, "world_size": 1, "zero_stage": None,
        "offload_optimizer": "none", "offload_parameters": "none", "precision": "fp32-autocast", "attention": "eager",
        "checkpointing": "full", "liger": False, "optimizer": "sgd", "reduce_bucket_elements": 1000, "method": "full",
        "lora_rank": None, "lora_targets": None,
    }  # fmt: skip
    assert [*values] == [field.name for field in dataclasses.fields(TrainingSetup) if field.name != "model"]
    flags = []
    for name, value in values.items():
        flags += [f"--{name.replace('_', '-')}", "none" if value is None else str(value).lower()]
    code, out, err = run("forecast", "gpt2-1.5b", *flags)
    assert (code, err) == (0, "")
    peak = memory.forecast(TrainingSetup(model="gpt2-1.5b", **values)).peak_bytes
    assert f"{peak:,}" in out
    help_text = process("forecast", "--help").stdout
    assert all(flag in help_text for flag in flags[::2])


def test_flags_of_lists_and_switches_reach_the_setup(refused):
    """Neither is modelled yet, so the error shows what arrived."""
    lines = refused(
        "forecast",
        "llama-3.1-8b",
        "--seq-len",
        "1",
        "--micro-batch",
        "1",
        "--liger",
        "--method",
        "lora",
        "--lora-rank",
        "8",
        "--lora-targets",
        "q_proj,v_proj",
    )
    assert [line.split(":")[0] for line in lines] == ["liger", "method"]


def test_flags_are_checked_as_json_is(refused):
    lines = refused("forecast", "lama-3.1-8b", "--seq-len", "4k", "--micro-batch", "-1", "--zero-stage", "4")
    assert sorted(line.split(" ")[0] for line in lines) == ["micro_batch:", "model:", "seq_len:", "zero_stage:"]
    lines = refused("forecast", "llama-3.1-8b", "--seq-length", "4096", "--gpus", "h200")
    assert ["--seq-length: no such option" in lines[0], "did you mean --seq-len" in lines[0]] == [True, True]
    assert "did you mean --gpu?" in lines[1]
    assert len(refused("forecast")) == 3
    assert refused("forecast", "gpt2-1.5b", "--json", "-", "--seq-len", "1", "--gpu", "h200") == [
        "MODEL: not allowed together with --json",
        "--seq-len: not allowed together with --json",
        "--gpu: not allowed together with --json",
    ]


def test_the_table_says_what_decides_and_whether_it_fits(run, refused):
    arguments = ["forecast", "llama-3.1-8b", "--seq-len", "4096", "--micro-batch", "1"]
    expected = memory.forecast(TrainingSetup(model="llama-3.1-8b", seq_len=4096, micro_batch=1))
    out = run(*arguments)[1]
    for name, size in expected.terms.items():
        assert any(line.split()[:2] == [name, f"{size:,}"] for line in out.splitlines()), name
    [decides] = [line for line in out.splitlines() if line.endswith("decides")]
    assert decides.split()[:4] == ["peak", "of", expected.peak_phase, f"{expected.peak_bytes:,}"]
    assert f"decided by: {expected.instant}" in out
    assert ": fits, " in run(*arguments, "--gpu", "h200")[1]
    assert ": does not fit, " in run(*arguments, "--gpu", "l40s")[1]
    [line] = refused(*arguments, "--gpu", "h300")
    assert line.startswith("gpu: 'h300'")


# ---- measure


def test_measure_without_a_gpu_says_what_to_do(refused, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA GPU")
    [line] = refused("measure", "training-step", "--out", tmp_path)
    assert line.startswith("device: 'cuda': torch ") and "--device cpu" in line


def test_measure_names_every_wrong_setup_of_a_list(refused, tmp_path):
    file = tmp_path / "setups.json"
    file.write_text(json.dumps([SETUP, {**SETUP, "seq_len": 0}, 7, {**SETUP, "model": "x"}]))
    lines = refused("measure", "training-step", "--setups", file)
    assert [line.split(": ")[1] for line in lines] == ["setup 2", "setup 3", "setup 4"]
    assert refused("measure", "training-step", "--setups", "nowhere.json")[0].startswith("nowhere.json: cannot be read")


def test_measure_refuses_rows_from_the_cpu_in_data(refused):
    [line] = refused("measure", "training-step", "--device", "cpu", "--out", "data")
    assert line.startswith("--device: 'cpu'")


def test_measure_of_a_small_model_on_the_cpu(tmp_path):
    """The whole way: setup, worker, rows, report."""
    pytest.importorskip("torch")
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    setups = [{"model": str(tmp_path), "seq_len": 32, "micro_batch": 1}]
    (tmp_path / "setups.json").write_text(json.dumps(setups))
    out = tmp_path / "out"
    arguments = [
        "measure",
        "training-step",
        "--device",
        "cpu",
        "--out",
        str(out),
        "--setups",
        str(tmp_path / "setups.json"),
    ]
    done = process(*arguments)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "[1/1]" in done.stderr and "1 measured; " in done.stderr
    rows = records.read("training-step", out)
    assert {row.metric for row in rows} == set(training_step.EXPERIMENT.metrics)
    assert {row.gpu for row in rows} == {"cpu"}


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_measure_that_is_interrupted_says_how_to_go_on(tmp_path, number):
    code = (
        "import sys; from utils import experiments, measure; from utils.__main__ import main;"
        "experiments.MODULES['echo'] = 'echo';"
        "measure._probe = lambda device: dict(gpu='cpu', gpu_count=0, driver='', cuda='', torch='2', libraries={},"
        " commit='unknown');"
        "sys.exit(main(sys.argv[1:]))"
    )
    log = tmp_path / "log"
    (tmp_path / "setups.json").write_text(
        json.dumps([{"number": 1}, {"number": 2, "behaviour": "hang", "log": str(log)}])
    )
    arguments = [
        "measure",
        "echo",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
        "--setups",
        str(tmp_path / "setups.json"),
    ]
    running = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=records.ROOT, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 20
    while not log.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    running.send_signal(number)
    err = running.communicate(timeout=5)[1]
    assert running.returncode == 130
    assert err.splitlines()[-1] == (
        f"interrupted; finished setups are in {tmp_path / 'echo.csv'}; run the same command to go on"
    )


# ---- records and report

STAMP = {
    "gpu": "NVIDIA H200", "gpu_count": 1, "driver": "580.1", "cuda": "13.0", "torch": "2.13.0",
    "libraries": '{"python":"3.11.7"}', "commit": "unknown", "utc": "2026-01-31T12:00:00.000Z", "method_version": 1,
    "experiment": "training-step",
}  # fmt: skip


def rows_of(setup: TrainingSetup, error: float = 0.0, **phases: int) -> list[records.Record]:
    """Rows of a run whose phases are as forecast, or as given; `error` is that of the forecast peak."""
    phases = {phase: round(n_bytes / (1 + error)) for phase, n_bytes in memory.forecast(setup).phases.items()} | phases
    metrics = {f"peak_{phase}": n_bytes for phase, n_bytes in phases.items()}
    metrics |= dict.fromkeys(("held", "reserved", "device"), 1) | {"peak": max(phases.values()), "step_ms": 1.5}
    return [
        records.Record(setup=setup.canonical(), metric=name, unit=training_step.EXPERIMENT.metrics[name], median=value,
                       p20=value, p80=value, repetitions=1, status="ok", reason="", **STAMP)
        for name, value in metrics.items()
    ]  # fmt: skip


def oom_row(setup: TrainingSetup) -> records.Record:
    return records.Record(setup=setup.canonical(), metric="peak", unit="bytes", median=None, p20=None, p80=None,
                          repetitions=0, status="oom", reason="no room", **STAMP)  # fmt: skip


@pytest.fixture
def rows():
    first, second, third = (TrainingSetup(**{**SETUP, "micro_batch": batch}) for batch in (1, 2, 3))
    step = max(memory.forecast(third).phases.values()) + 2**20
    return [
        *rows_of(first, error=0.01),
        *rows_of(second, error=-0.03),
        *rows_of(third, step=step),
        oom_row(TrainingSetup(**{**SETUP, "attention": "eager", "seq_len": 32768})),
        oom_row(TrainingSetup(**{**SETUP, "seq_len": 1})),
    ]


def test_compare_gives_signed_errors_and_the_phases_that_decide(rows):
    comparisons = report.compare(rows)
    assert [round(one.error, 4) for one in comparisons[:2]] == [0.01, -0.03]
    assert comparisons[2].error < 0
    assert [one.phase_right for one in comparisons] == [True, True, False]
    assert [one.measured_phase for one in comparisons] == ["backward", "backward", "step"]
    total = report.summary(comparisons)
    assert total.rows == 3
    assert total.median_error == pytest.approx(statistics.median([0.01, 0.03, abs(comparisons[2].error)]), rel=1e-4)
    assert total.worst_error == pytest.approx(0.03, rel=1e-4)
    assert total.phases_right == pytest.approx(2 / 3)


def test_out_of_memory_is_compared_with_the_memory_of_the_gpu(rows):
    found = report.out_of_memory(rows)
    assert [one.verdict for one in found] == ["does not fit", "fits (wrong)"]
    assert found[0].capacity_bytes == hardware.get("h200").memory_bytes


def test_report_forecast_in_three_styles(run, refused, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "DATA", tmp_path)
    monkeypatch.setattr(records.read, "__defaults__", (tmp_path,))
    monkeypatch.setattr(records, "LOCAL", tmp_path / "local")
    [line] = refused("report", "forecast")
    assert line.endswith("no such file; `python -m utils measure training-step` makes records")
    [line] = refused("report", "forecast", "--local")
    assert line == "no training step that fitted is recorded here"
    records.append(records.path_of("training-step", tmp_path), rows)
    code, out, err = run("report", "forecast")
    assert (code, err) == (0, "")
    assert "+1.0 %" in out and "-3.0 %" in out and "backward (wrong)" in out and "fits (wrong)" in out
    assert "3 setups on NVIDIA H200 (torch 2.13.0): absolute error of the peak median 1.000 %, worst 3.00 %" in out
    assert "deciding phase right in 66.7 %" in out
    assert run("report", "forecast", "--markdown")[1].startswith("| model | setup | measured |")
    lines = run("report", "forecast", "--csv")[1].splitlines()
    assert lines[0].startswith("model,setup,gpu,torch,measured_bytes,") and len(lines) == 4
    [line] = refused("report", "forecast", "--csv", "--markdown")
    assert "not allowed with argument" in line


def test_records_check_and_add(run, refused, rows, tmp_path, monkeypatch):
    data, file = tmp_path / "data", tmp_path / "from-the-gpu.csv"
    data.mkdir()
    monkeypatch.setattr(records.merge, "__defaults__", (data, None))
    monkeypatch.setattr(records.check, "__defaults__", (data,))
    monkeypatch.setattr(records, "DATA", data)
    records.append(file, rows)
    shown = f"{data / 'training-step.csv'}"
    assert run("records", "add", file) == (0, f"{shown}: {len(rows)} rows added, 0 were there\n", "")
    assert run("records", "add", file) == (0, f"{shown}: 0 rows added, {len(rows)} were there\n", "")
    assert run("records", "check") == (0, f"{shown}: {len(rows)} rows, 5 setups, NVIDIA H200\n", "")
    content = (data / "training-step.csv").read_text().split("\n")
    content[3] = content[3].replace("bytes", "GiB")
    content[5] = "<<<<<<< HEAD"
    (data / "training-step.csv").write_text("\n".join(content))
    assert refused("records", "check") == [
        f"{shown}:4: unit: 'GiB': {content[3].split(',GiB')[0].split(',')[-1]} is in bytes",
        f"{shown}:6: columns: 1: a row has 19",
    ]


def test_report_speed_prints_both_times_and_whether_they_are_kept(run, monkeypatch):
    monkeypatch.setattr(report, "speed", lambda: (0.0002, 3.0))
    code, out, err = run("report", "speed")
    assert (code, err) == (0, "")
    assert [line.split()[-1] for line in out.splitlines()] == ["kept", "yes", "yes"]
    assert "0.200 ms" in out and "3.00 s" in out
    monkeypatch.setattr(report, "speed", lambda: (0.0002, 6.0))
    code, out, err = run("report", "speed")
    assert code == 1 and [line.split()[-1] for line in out.splitlines()] == ["kept", "yes", "no"]


def test_speed_is_measured_over_setups_that_differ():
    setups = report.varied_setups(report.SPEED_COUNT)
    assert len({json.dumps(setup, sort_keys=True) for setup in setups}) == 10_000
    assert {setup["model"] for setup in setups} == set(models.names())
    one, many = report.speed(count=200)
    assert one < report.SPEED_LIMIT_ONE_S
    assert many < report.SPEED_LIMIT_MANY_S * 200 / report.SPEED_COUNT * 3


def test_report_environment(run):
    pytest.importorskip("torch")
    code, out, err = run("report", "environment")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert names[0] == "gpu" and {"torch", "python", "commit"} <= set(names)
    assert json.loads(run("report", "environment", "--json")[1])["torch"] in out


# ---- the setups of training-step


def test_the_list_of_training_step_has_what_the_book_needs():
    setups = training_step.setups()
    assert len(setups) == len(set(setups)) >= 56
    assert not [setup for setup in setups if setup.warnings]
    assert {setup.model for setup in setups} >= {"llama-3.1-8b", "smollm2-360m", "gpt2-1.5b", "qwen3-8b", "llama-2-7b"}
    for field, values in {
        "attention": {"eager", "sdpa"}, "checkpointing": {"none", "full"}, "precision": {"bf16", "fp32-autocast"},
        "optimizer": {"adamw", "adamw-single", "adamw-fused", "adamw-8bit", "sgd"}, "gradient_accumulation": {1, 2, 4},
    }.items():  # fmt: skip
        assert {getattr(setup, field) for setup in setups} == values
    assert min(setup.seq_len for setup in setups) == 512 and max(setup.seq_len for setup in setups) == 32768
    room = hardware.get("h200").memory_bytes
    too_large = [setup for setup in setups if memory.forecast(setup).device_bytes > room]
    assert len(too_large) == 4
