"""The command line: `python -m utils COMMAND`.

Results go to stdout. Progress, warnings and errors go to stderr. Wrong input gives one line a problem, nothing on
stdout and exit code 2. Modules are imported by the command that needs them: `models` and `forecast` start at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

from utils.errors import InputError, did_you_mean

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one line that suggest the nearest name."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str):
        raise InputError(f"{self.prog}: {message}")

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            name = "/".join(action.option_strings) or action.metavar or action.dest
            near = did_you_mean(str(value), list(action.choices))
            self.error(f"{name}: {value!r}: allowed: {', '.join(map(str, action.choices))}{near}")


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        options, unknown = _parser(arguments).parse_known_args(arguments)
        if unknown:
            raise InputError(*_unknown_errors(options, unknown))
        return options.run(options) or 0
    except InputError as error:
        print("\n".join(error.errors), file=sys.stderr)
    except BrokenPipeError:
        # The reader of our stdout has gone (`| head`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"{place}{error.strerror or error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_WRONG_INPUT


def _unknown_errors(options, unknown: list[str]) -> list[str]:
    known = [flag for flag in options.parser._option_string_actions if flag.startswith("--")]
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if flags:
        allowed = ", ".join(known)
        return [f"{flag}: no such option; one of {allowed}{did_you_mean(flag, known)}" for flag in flags]
    return [f"{options.parser.prog}: {word!r} is one argument too many" for word in unknown]


def _add_commands(parser: _Parser, metavar: str):
    """Subcommands, with an error that lists them if none is given."""
    commands = parser.add_subparsers(metavar=metavar, parser_class=_Parser)

    def missing(options):
        raise InputError(f"{parser.prog}: {metavar}: missing; one of {', '.join(commands.choices)}")

    parser.set_defaults(run=missing, parser=parser)
    return commands


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m utils", description=__doc__)
    commands = _add_commands(parser, "COMMAND")

    command = commands.add_parser("models", help="the models that are known, with their sizes")
    command.add_argument("--json", action="store_true", help="a JSON list instead of a table")
    command.set_defaults(run=_models, parser=command)

    command = commands.add_parser(
        "forecast",
        help="bytes of one training step, by term and by phase",
        description=_FORECAST,
        # A flag that is left out stays out, so that its default is written in one place, TrainingSetup.
        argument_default=argparse.SUPPRESS,
    )
    if "forecast" in arguments:
        _add_forecast_options(command)
    command.set_defaults(run=_forecast, parser=command)

    command = commands.add_parser("measure", help="measure an experiment on this machine", description=_MEASURE)
    command.add_argument("experiment", metavar="NAME", help="for example training-step")
    command.add_argument("--out", metavar="DIR", type=Path, help="folder of the CSV file (data/local)")
    command.add_argument("--setups", metavar="FILE", help="a JSON list of setups to measure instead of the book's")
    command.add_argument(
        "--jobs",
        metavar="N",
        type=_positive_int,
        default=1,
        help="workers that are prepared side by side; they take turns on the GPU (1)",
    )
    command.add_argument(
        "--timeout", metavar="S", type=_positive_float, default=600, help="seconds after which a setup has failed (600)"
    )
    command.add_argument("--again", action="store_true", help="measure also what has a result")
    command.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu counts the bytes of live tensors instead (never for data/)",
    )
    command.set_defaults(run=_measure, parser=command)

    command = commands.add_parser("records", help="check data/, or add rows measured elsewhere")
    actions = _add_commands(command, "ACTION")
    action = actions.add_parser("check", help="validate every row of data/")
    action.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="another folder than data/")
    action.set_defaults(run=_records_check, parser=action)
    action = actions.add_parser("add", help="add the rows of a file to data/; rows already there are skipped")
    action.add_argument("files", metavar="FILE", type=Path, nargs="+")
    action.add_argument("--commit", help="the commit that was measured, for rows that do not know it")
    action.set_defaults(run=_records_add, parser=action)

    command = commands.add_parser("report", help="how good, how fast, on what machine")
    reports = _add_commands(command, "REPORT")
    report = reports.add_parser("forecast", help="the forecast beside every recorded training step")
    report.add_argument("--local", action="store_true", help="the records of this machine (data/local)")
    style = report.add_mutually_exclusive_group()
    style.add_argument("--markdown", dest="style", action="store_const", const="markdown", default="text")
    style.add_argument("--csv", dest="style", action="store_const", const="csv", help="bytes and fractions")
    report.set_defaults(run=_report_forecast, parser=report)
    report = reports.add_parser("speed", help="the time of one forecast and of ten thousand")
    report.set_defaults(run=_report_speed, parser=report)
    report = reports.add_parser("environment", help="GPU, driver, libraries, commit")
    report.add_argument("--json", action="store_true", help="a JSON object instead of lines")
    report.set_defaults(run=_report_environment, parser=report)
    return parser


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more")
    return int(text)


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return value


# ---- models


def _models(options) -> None:
    from utils import models
    from utils.tables import table

    known = [models.get(name) for name in models.names()]
    if options.json:
        print(json.dumps([{**dataclasses.asdict(one), "parameters": one.parameters} for one in known], indent=2))
        return
    rows = [["model", "parameters", "layers", "hidden", "heads", "kv heads", "mlp", "vocabulary", "tied", "longest"]]
    rows += [
        [
            one.name,
            f"{one.parameters:,}",
            one.layers,
            one.hidden_size,
            one.heads,
            one.kv_heads,
            one.intermediate_size,
            one.vocab_size,
            "yes" if one.tied_embeddings else "no",
            one.max_positions,
        ]
        for one in known
    ]
    print(table(rows))


# ---- forecast

_FORECAST = """\
Memory of one training step: how many bytes each GPU needs, which phase decides, and why.

  python -m utils forecast llama-3.1-8b --seq-len 4096 --micro-batch 1 --gpu h200
  python -m utils forecast --json setup.json       (- reads stdin; prints one JSON object)
"""


def _add_forecast_options(command: argparse.ArgumentParser) -> None:
    """One flag a field of TrainingSetup, so that the two cannot drift apart."""
    from utils import hardware
    from utils.setups import TrainingSetup

    command.add_argument("--json", metavar="FILE", dest="file", help="a setup as JSON; - for stdin")
    command.add_argument("--gpu", metavar="NAME", help=f"also tell whether it fits: {', '.join(hardware.names())}")
    for field in dataclasses.fields(TrainingSetup):
        if field.name == "model":
            command.add_argument("model", metavar="MODEL", nargs="?", help="a known model, or a path to a config.json")
            continue
        flag, required = f"--{field.name.replace('_', '-')}", field.default is dataclasses.MISSING
        note = "required" if required else f"default {'none' if field.default is None else field.default}"
        value = (
            {"nargs": "?", "const": "true", "metavar": "true|false"} if field.type == "bool" else {"metavar": "VALUE"}
        )
        command.add_argument(flag, dest=field.name, help=note, **value)


def _field_value(field: dataclasses.Field, text: str):
    """A flag's text as the field's JSON value. What does not fit stays text, for the setup to refuse."""
    if field.default is None and text in ("none", "null"):
        return None
    if field.type.startswith("str"):
        return text
    if field.type.startswith("tuple"):
        return text.split(",")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _forecast(options) -> None:
    from utils.memory import forecast
    from utils.setups import TrainingSetup

    given = vars(options)
    flags = {field.name: given[field.name] for field in dataclasses.fields(TrainingSetup) if field.name in given}
    if "file" in given:
        extra = [f"--{name.replace('_', '-')}" if name != "model" else "MODEL" for name in flags]
        extra += ["--gpu"] if "gpu" in given else []
        if extra:
            raise InputError(*(f"{name}: not allowed together with --json" for name in extra))
        setup = TrainingSetup.from_dict(_read_json(given["file"], dict))
        _warn(setup)
        print(json.dumps(forecast(setup).to_dict(), indent=2))
        return
    types = {field.name: field for field in dataclasses.fields(TrainingSetup)}
    setup = TrainingSetup.from_dict({name: _field_value(types[name], value) for name, value in flags.items()})
    gpu = None
    if "gpu" in given:
        from utils import hardware

        gpu = hardware.get(given["gpu"])
    _warn(setup)
    print(_forecast_table(setup, forecast(setup), gpu))


def _warn(setup) -> None:
    for warning in setup.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _forecast_table(setup, result, gpu) -> str:
    from utils.experiments import label
    from utils.tables import table
    from utils.units import gib

    peak = {phase: "decides" if phase == result.peak_phase else "" for phase in result.phases}
    rows = [["", "bytes per GPU", "GiB", ""]]
    rows += [[f"  {name}", f"{size:,}", gib(size), ""] for name, size in result.terms.items()]
    rows += [[f"peak of {phase}", f"{size:,}", gib(size), peak[phase]] for phase, size in result.phases.items()]
    rows += [["peak allocated", f"{result.peak_bytes:,}", gib(result.peak_bytes), ""]]
    rows += [["reserved", f"{result.reserved_bytes:,}", gib(result.reserved_bytes), ""]]
    rows += [["on the device", f"{result.device_bytes:,}", gib(result.device_bytes), ""]]
    rows += [["on the host", f"{result.host_bytes:,}", gib(result.host_bytes), ""]]
    lines = [label(setup), f"{result.parameters:,} parameters", "", table(rows), "", f"decided by: {result.instant}"]
    if gpu is not None:
        room = gpu.memory_bytes - result.device_bytes
        verdict = f"fits, {gib(room)} to spare" if room >= 0 else f"does not fit, {gib(-room)} too much"
        lines.append(f"{gpu.name} ({gib(gpu.memory_bytes)}): {verdict}")
    return "\n".join(lines)


def _read_json(file: str, kind: type):
    """The JSON object or list in a file ("-": stdin). Raises `InputError` that names the file and the place in it."""
    name = "stdin" if file == "-" else file
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(value, kind):
        raise InputError(f"{name}: a JSON {'object' if kind is dict else 'list'} is required")
    return value


def _unique(pairs: list[tuple]) -> dict:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)} given more than once")
    return fields


# ---- measure

_MEASURE = """\
Measure every setup of an experiment in a process of its own and write the rows to data/local/NAME.csv.
A setup that has a result there is skipped, so the command can be interrupted and run again.
"""


def _measure(options) -> int:
    from utils import experiments, measure, records

    experiment = experiments.get(options.experiment)
    setups = None
    if options.setups is not None:
        setups, errors = [], []
        for number, fields in enumerate(_read_json(options.setups, list), start=1):
            try:
                setups.append(experiment.setup_type.from_dict(fields))
            except InputError as error:
                errors += [f"{options.setups}: setup {number}: {text}" for text in error.errors]
        if errors:
            raise InputError(*errors)
    folder = records.LOCAL if options.out is None else options.out
    file = records.shown(records.path_of(experiment.name, folder))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tally = measure.run(
            experiment,
            setups,
            folder=folder,
            device=options.device,
            jobs=options.jobs,
            timeout_s=options.timeout,
            again=options.again,
        )
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished setups are in {file}; run the same command to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    words = {"ok": "measured", "oom": "out of memory", "failed": "failed", "skipped": "had a result"}
    told = ", ".join(f"{tally[status]} {word}" for status, word in words.items() if tally[status])
    print(f"{told or 'nothing to do'}; {file}", file=sys.stderr)
    return EXIT_FAILED if tally["failed"] else 0


# ---- records


def _records_check(options) -> None:
    from utils import records

    for path, rows in records.check(options.folder or records.DATA).items():
        setups = len({record.setup for record in rows})
        machines = ", ".join(sorted({record.gpu for record in rows}))
        print(f"{records.shown(path)}: {len(rows)} rows, {setups} setups, {machines}")


def _records_add(options) -> None:
    from utils import records

    for file in options.files:
        path, added, skipped = records.merge(file, commit=options.commit)
        print(f"{records.shown(path)}: {added} rows added, {skipped} were there")


# ---- report


def _report_forecast(options) -> None:
    from utils import records, report

    rows = records.local("training-step") if options.local else records.read("training-step")
    print(report.forecast_report(rows, options.style))


def _report_speed(options) -> int:
    from utils import report

    text, kept = report.speed_report()
    print(text)
    return 0 if kept else EXIT_FAILED


def _report_environment(options) -> None:
    from utils import measure, report

    stamp = measure.environment()
    print(json.dumps(stamp, indent=2) if options.json else report.environment_report(stamp))


if __name__ == "__main__":
    sys.exit(main())
