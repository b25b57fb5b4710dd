"""The figures: axes start at zero, everything is named, and no two terms look alike."""

from __future__ import annotations

import io

import matplotlib.pyplot as plt
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from utils import plots
from utils.units import GIB, MIB

SETUPS = {
    "bf16": {"parameters": 15 * GIB, "gradients": 15 * GIB, "optimizer_states": 30 * GIB, "logits": GIB // 4},
    "bf16-master": {"parameters": 15 * GIB, "gradients": 15 * GIB, "optimizer_states": 90 * GIB, "logits": GIB // 4},
}


@pytest.fixture(autouse=True)
def restored_defaults():
    with plt.rc_context():
        plots.style()
        yield


@pytest.fixture
def ax():
    figure = Figure()
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def texts(ax) -> list[str]:
    legends = [text.get_text() for legend in ax.figure.legends for text in legend.get_texts()]
    return [text.get_text() for text in ax.texts] + legends


def test_style_is_opaque_white_and_as_wide_as_a_phone(ax):
    ax.plot([0, 1], [0, 1])
    picture = io.BytesIO()
    ax.figure.savefig(picture, format="raw")
    assert picture.getvalue()[:4] == b"\xff\xff\xff\xff"
    assert ax.figure.get_figwidth() * 72 <= 390


def test_stacked_terms_start_at_zero_and_add_up(ax):
    assert plots.stacked_terms(ax, SETUPS, capacities={"80 GiB": 80 * GIB}) is None
    assert ax.get_xlim()[0] == 0
    for y, row in enumerate(SETUPS.values()):
        bars = [bar for bar in ax.patches if abs(bar.get_y() + bar.get_height() / 2 - y) < 1e-9]
        assert min(bar.get_x() for bar in bars) == 0
        assert sum(bar.get_width() for bar in bars) == pytest.approx(sum(row.values()) / GIB)


def test_stacked_terms_name_every_term_total_and_capacity(ax):
    plots.stacked_terms(ax, SETUPS, capacities={"80 GiB": 80 * GIB})
    assert {"parameters", "gradients", "optimizer states", "logits", "60.2 GiB", "80 GiB"} <= set(texts(ax))
    assert [label.get_text() for label in ax.get_yticklabels()] == list(SETUPS)
    assert "GiB" in ax.get_xlabel()


def test_a_term_keeps_its_look_and_shares_it_with_no_other(ax):
    terms = [f"term_{number}" for number in range(12)]
    plots.stacked_terms(ax, {"one": dict.fromkeys(terms, GIB), "two": dict.fromkeys(terms, 2 * GIB)})
    looks = [(to_hex(bar.get_facecolor()), bar.get_hatch()) for bar in ax.patches]
    assert looks[:12] == looks[12:]
    assert len(set(looks[:12])) == 12


def test_a_term_looks_the_same_in_every_figure(ax):
    plots.stacked_terms(ax, {"one": {"inputs": GIB, "gradients": GIB}})
    other = Figure().add_subplot()
    plots.stacked_terms(other, {"one": {"gradients": GIB, "activations": GIB}})
    assert to_hex(ax.patches[1].get_facecolor()) == to_hex(other.patches[0].get_facecolor())
    assert to_hex(ax.patches[0].get_facecolor()) != to_hex(ax.patches[1].get_facecolor())


def test_too_many_terms_are_refused(ax):
    with pytest.raises(ValueError, match="30 terms in one figure, at most 24"):
        plots.stacked_terms(ax, {"one": {f"term_{number}": GIB for number in range(30)}})


def test_memory_timeline_marks_the_peak_and_the_phases(ax):
    allocated = [GIB, 3 * GIB, 2 * GIB, 5 * GIB, GIB]
    phases = [("forward", 0, 2), ("backward", 2, 4), ("step", 4, 5)]
    assert plots.memory_timeline(ax, allocated, phases, capacities={"24 GiB": 24 * GIB}) is None
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > 24
    assert {"peak 5.00 GiB", "forward", "backward", "step", "24 GiB"} <= set(texts(ax))
    (peak,) = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert (peak.get_xdata()[0], peak.get_ydata()[0]) == (3, 5)


def test_memory_timeline_keeps_the_names_of_short_phases_apart(ax):
    phases = [("forward", 0, 990), ("backward", 990, 995), ("step", 995, 1000)]
    plots.memory_timeline(ax, [GIB] * 1000, phases)
    ax.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_text() in ("backward", "step")]
    assert not boxes[0].overlaps(boxes[1])
    assert boxes[1].x0 < ax.get_window_extent().x1


def test_forecast_against_record_is_signed(ax):
    rows = [("llama", 102 * GIB, 100 * GIB), ("llama", 100 * GIB, 100 * GIB), ("gpt2", 95 * GIB, 100 * GIB)]
    assert plots.forecast_against_record(ax, rows, tolerance=0.01) is None
    assert {"+2.0 %", "-5.0 %"} <= set(texts(ax))
    dots = [(list(line.get_xdata()), set(line.get_ydata())) for line in ax.lines if line.get_marker() == "o"]
    assert dots[0][0] == pytest.approx([2, 0]) and dots[0][1] == {0}
    assert dots[1][0] == pytest.approx([-5]) and dots[1][1] == {1}
    left, right = ax.get_xlim()
    assert left == -right and left < -5


def test_lines_by_length_double_along_the_axis_and_are_named(ax):
    lengths = [512, 1024, 2048, 4096]
    series = {"sdpa": [(n, n * 2**20) for n in lengths], "eager": [(n, n * n * 2**10) for n in lengths[:3]]}
    points = {"sdpa": [(2048, 2100 * 2**20)]}
    assert plots.lines_by_length(ax, series, points=points, capacities={"8 GiB": 8 * GIB}) is None
    ax.figure.draw_without_rendering()
    assert ax.get_ylim()[0] == 0
    assert {"sdpa", "eager", "8 GiB"} <= set(texts(ax))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["512", "1k", "2k", "4k"]
    colours = [to_hex(line.get_color()) for line in ax.lines if len(line.get_xdata()) > 2]
    assert len(colours) == len(set(colours)) == 2


def test_lines_by_length_keep_close_names_apart(ax):
    series = {name: [(512, GIB), (1024, 2 * GIB + offset)] for offset, name in enumerate(["one", "two", "three"])}
    plots.lines_by_length(ax, series)
    boxes = sorted((text.get_window_extent() for text in ax.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1 for below, above in zip(boxes, boxes[1:], strict=False))


def test_lines_by_length_can_double_the_bytes_too(ax):
    lengths = [512, 1024, 2048]
    plots.lines_by_length(ax, {"linear": [(n, n * 2**20) for n in lengths]}, doubling_bytes=True)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    ax.figure.draw_without_rendering()
    line = ax.lines[0]
    corners = ax.transData.transform(line.get_xydata())
    rises = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in zip(corners, corners[1:], strict=False)]
    assert rises == pytest.approx([1, 1])


def test_phase_peaks_name_the_deciding_phase_and_its_bytes(ax):
    setups = {
        "none": {"forward": 70 * GIB, "backward": 76 * GIB, "step": 75 * GIB},
        "full": {"forward": 50 * GIB, "backward": 60 * GIB, "step": 75 * GIB},
    }
    assert plots.phase_peaks(ax, setups, capacities={"80 GiB": 80 * GIB}) is None
    assert ax.get_xlim()[0] == 0
    assert {"none", "full", "76.00 GiB", "75.00 GiB", "80 GiB"} <= set(texts(ax))
    dark = [bar for bar in ax.patches if to_hex(bar.get_facecolor()) == plots.PALETTE[0].lower()]
    assert [bar.get_width() for bar in dark] == [76, 75]


def test_a_small_timeline_is_in_mib(ax):
    plots.memory_timeline(ax, [0, 3 * MIB, MIB], [("forward", 0, 3)])
    assert "peak 3.0 MiB" in texts(ax)
    assert ax.get_ylabel() == "allocated, MiB"


def test_lifetimes_name_every_term_phase_and_instant(ax):
    rows = {"parameters": [(0, 1), (2, 1)], "saved_tensors": [(0, 0), (1, 1), (2, 0)]}
    assert plots.lifetimes(ax, rows, ["forward", "backward"], instants={"peak": 1.0}) is None
    assert {"forward", "backward", "peak"} <= set(texts(ax))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["parameters", "saved tensors"]
    assert ax.get_xlim() == (0, 2)
