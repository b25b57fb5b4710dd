"""Figures: one style, one function for each kind of figure of the book.

Every function draws on the axes it is given and returns None, so that a cell which ends in it has no text output.
Inputs are plain lists and dicts of bytes (`int`). Titles are left to the page: a figure's caption says what it shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from utils.units import GIB, MIB, gib, mib, signed_percent

# Okabe and Ito's colours, which people with any common colour vision deficiency can tell apart (Nature Methods 8:441).
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7", "#F0E442", "#999999")
# The ones of these that are dark enough for a thin line and its name.
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#222222")
INK = "#222222"
TEXT_ZORDER = 5  # over capacity lines
QUIET = "#777777"
BAND = "#EFEFEF"
HATCHES = ("", "///", "...")

# The large terms of a forecast look the same in every chapter; the others take what is left, in order.
TERM_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_states": "#009E73",
    "activations": "#56B4E9",
    "logits_and_loss": "#D55E00",
    "optimizer_temporaries": "#CC79A7",
    "autocast_copies": "#F0E442",
}


def style() -> None:
    """Set matplotlib's defaults for the book: call it once, after the imports of a chapter.

    A figure is as wide as a phone (5.2 in at 72 pt/in is 374 px), so its 10 pt text stays legible there, and it has
    twice the pixels that a wide screen shows. White is opaque, because the page may be dark.
    """
    plt.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": QUIET,
            "axes.facecolor": "white",
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.prop_cycle": plt.cycler(color=PALETTE),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "figure.dpi": 200,
            "figure.facecolor": "white",
            "figure.figsize": (5.2, 3.2),
            "font.size": 10,
            "grid.color": "#DDDDDD",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 2,
            "lines.markersize": 5,
            "savefig.facecolor": "white",
            "savefig.transparent": False,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def stacked_terms(
    ax: Axes, setups: Mapping[str, Mapping[str, int]], *, capacities: Mapping[str, int] | None = None
) -> None:
    """Draw one horizontal bar a setup, stacked by term, against the capacity of some GPUs.

    `setups`: label -> {term -> bytes}, drawn from the top; a term has one colour in all bars, and those of
    `TERM_COLOURS` in all figures.
    `capacities`: label -> bytes, each a vertical line.
    A term is named inside its widest segment; where one of them is too narrow for that, all are named below too.
    """
    terms = list(dict.fromkeys(term for row in setups.values() for term in row))
    looks = _looks(terms)
    totals = [sum(row.values()) for row in setups.values()]
    segments: dict[str, list[tuple[float, float, int]]] = {term: [] for term in terms}
    for y, row in enumerate(setups.values()):
        left = 0.0
        for term, n_bytes in row.items():
            width = n_bytes / GIB
            colour, hatch = looks[term]
            ax.barh(y, width, left=left, height=0.62, color=colour, hatch=hatch, edgecolor="white", linewidth=0.8)
            segments[term].append((width, left + width / 2, y))
            left += width
        total = ax.annotate(gib(totals[y], 1), (left, y), (5, 0), textcoords="offset points", va="center", fontsize=9)
        total.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        total.set_zorder(TEXT_ZORDER)

    ax.set_yticks(range(len(setups)), list(setups))
    ax.set_ylim(len(setups) - 0.5, -0.5)
    ax.set_xlim(0, 1.18 * max([*totals, *(capacities or {}).values()]) / GIB)
    ax.set_xlabel("GiB")
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    _capacity_lines(ax, capacities, vertical=True)

    ax.figure.draw_without_rendering()  # the layout decides how wide a segment is on paper
    unnamed = [term for term in terms if not _name_inside(ax, term, max(segments[term]), looks[term])]
    if unnamed:  # then all: a reader who looks a colour up should find it
        handles = [Patch(facecolor=looks[term][0], hatch=looks[term][1], edgecolor="white") for term in terms]
        names = [_words(term) for term in terms]
        ax.figure.legend(handles, names, loc="outside lower center", ncols=3, handlelength=1, columnspacing=1)


def memory_timeline(
    ax: Axes,
    allocated: Sequence[int],
    phases: Iterable[tuple[str, int, int]],
    *,
    capacities: Mapping[str, int] | None = None,
) -> None:
    """Draw the bytes allocated after each event (an allocation or a release) of a training step, and mark the peak.

    `allocated`: bytes after event 0, 1, 2, …
    `phases`: (name, first event, event after the last), each a band behind the line.
    `capacities`: label -> bytes, each a horizontal line. A step that stays below 1 GiB is drawn in MiB.
    """
    drawn = max([*allocated, *(capacities or {}).values()])
    unit, unit_name, as_text = (GIB, "GiB", gib) if drawn >= GIB else (MIB, "MiB", mib)
    line = [n_bytes / unit for n_bytes in [*allocated, allocated[-1]]]  # the last value holds to the right edge
    ax.step(range(len(line)), line, where="post", linewidth=1.2)
    ax.set_xlim(0, len(allocated))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(0, 1.18 * drawn / unit)
    ax.set_xlabel("event (allocation or release)")
    ax.set_ylabel(f"allocated, {unit_name}")
    _capacity_lines(ax, capacities, vertical=False, unit=unit)

    peak = max(allocated)
    at = list(allocated).index(peak)
    ax.plot([at], [peak / unit], "o", color=PALETTE[4], zorder=3)
    left_half = at < len(allocated) / 2
    ax.annotate(
        f"peak {as_text(peak)}",
        (at, peak / unit),
        (6 if left_half else -6, 4),
        textcoords="offset points",
        ha="left" if left_half else "right",
        va="bottom",
        fontsize=9,
    )

    names = []
    for number, (name, start, stop) in enumerate(phases):
        if number % 2 == 0:
            ax.axvspan(start, stop, color=BAND, linewidth=0, zorder=0)
        names.append(
            ax.text((start + stop) / 2, 1.02, name, transform=ax.get_xaxis_transform(), ha="center", fontsize=9)
        )
    ax.figure.draw_without_rendering()
    right_end = float("-inf")
    for text in names:  # a short phase: its name goes above its neighbour's
        box = text.get_window_extent()
        if box.x0 < right_end + 4:
            text.set_y(1.09)
        else:
            right_end = box.x1


def forecast_against_record(ax: Axes, rows: Iterable[tuple[str, int, int]], *, tolerance: float | None = None) -> None:
    """Draw the signed error of every forecast, one line of dots for each group of setups.

    `rows`: (group, forecast bytes, recorded bytes); the error is forecast / recorded - 1.
    `tolerance`: a fraction; the band of errors within it is shaded.
    The widest error of a group is written beside its dot.
    """
    groups: dict[str, list[float]] = {}
    for group, forecast, recorded in rows:
        groups.setdefault(group, []).append(forecast / recorded - 1)
    worst = max((abs(error) for errors in groups.values() for error in errors), default=0.0)
    reach = 1.35 * max(worst, tolerance or 0.0, 1e-4)
    if tolerance is not None:
        ax.axvspan(-100 * tolerance, 100 * tolerance, color=BAND, linewidth=0, zorder=0)
    ax.axvline(0, color=INK, linewidth=1)
    for y, errors in enumerate(groups.values()):
        ax.plot([100 * error for error in errors], [y] * len(errors), "o", color=PALETTE[0], alpha=0.6, mew=0)
        widest = max(errors, key=abs)
        side = 1 if widest >= 0 else -1
        ax.annotate(
            signed_percent(widest),
            (100 * widest, y),
            (5 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=9,
        )
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.set_xlim(-100 * reach, 100 * reach)
    ax.set_xlabel("forecast against record, %")
    ax.grid(False, axis="y")


def lines_by_length(
    ax: Axes,
    series: Mapping[str, Sequence[tuple[int, int]]],
    *,
    points: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    capacities: Mapping[str, int] | None = None,
    doubling_bytes: bool = False,
) -> None:
    """Draw bytes against the sequence length (doubling along the axis), one named line a series.

    `doubling_bytes`: the bytes double along their axis too, so that growth with a power of the length is a straight
    line, whose slope is the power. Without it the axis starts at zero, and even linear growth bends upwards.

    `series`: label -> [(tokens, bytes), …], usually forecasts.
    `points`: label -> [(tokens, bytes), …], usually records, drawn as rings in the colour of the series of that name.
    `capacities`: label -> bytes, each a horizontal line.
    """
    points = points or {}
    drawn = [pair for pairs in [*series.values(), *points.values()] for pair in pairs]
    lengths = sorted({length for length, _ in drawn})
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(lengths))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _tokens(int(tokens))))
    ax.set_xlabel("sequence length, tokens")
    ax.set_ylabel("GiB")
    if doubling_bytes:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda n_gib, _: f"{n_gib:g}"))
        ax.set_aspect("equal")
    else:
        ax.set_ylim(0, 1.08 * max([n_bytes for _, n_bytes in drawn] + list((capacities or {}).values())) / GIB)
    _capacity_lines(ax, capacities, vertical=False)

    ends = []
    for number, (label, pairs) in enumerate(series.items()):
        colour = LINES[number % len(LINES)]
        pairs = sorted(pairs)
        ax.plot([length for length, _ in pairs], [n_bytes / GIB for _, n_bytes in pairs], color=colour)
        rings = sorted(points.get(label, []))
        ax.plot(
            [length for length, _ in rings],
            [n_bytes / GIB for _, n_bytes in rings],
            "o",
            color=colour,
            markerfacecolor="white",
            markeredgewidth=1.5,
        )
        ends.append((pairs[-1][0], pairs[-1][1] / GIB, label, colour))
    _name_lines(ax, ends)


def phase_peaks(
    ax: Axes, setups: Mapping[str, Mapping[str, int]], *, capacities: Mapping[str, int] | None = None
) -> None:
    """Draw the peak of each phase as a bar, one group of bars a setup, and write the deciding one's bytes beside it.

    `setups`: label -> {phase -> bytes}, drawn from the top. The phase that decides is dark, the others are light.
    `capacities`: label -> bytes, each a vertical line.
    """
    ticks, names, y = [], [], 0.0
    for label, phases in setups.items():
        decides = max(phases, key=phases.__getitem__)
        ax.text(0, y - 0.75, label, va="center", fontsize=9, fontweight="bold")
        for phase, n_bytes in phases.items():
            colour = PALETTE[0] if phase == decides else PALETTE[3]
            ax.barh(y, n_bytes / GIB, height=0.8, color=colour, edgecolor="white", linewidth=0.8)
            ticks.append(y)
            names.append(phase)
            if phase == decides:
                total = ax.annotate(
                    gib(n_bytes), (n_bytes / GIB, y), (5, 0), textcoords="offset points", va="center", fontsize=9
                )
                total.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
                total.set_zorder(TEXT_ZORDER)
            y += 0.85
        y += 0.95
    ax.set_yticks(ticks, names)
    ax.set_ylim(y - 1.3, -1.2)
    largest = max([n_bytes for phases in setups.values() for n_bytes in phases.values()])
    ax.set_xlim(0, 1.18 * max(largest, *(capacities or {"": 0}).values()) / GIB)
    ax.set_xlabel("GiB")
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    _capacity_lines(ax, capacities, vertical=True)


def lifetimes(
    ax: Axes,
    rows: Mapping[str, Sequence[tuple[float, float]]],
    phases: Sequence[str],
    *,
    instants: Mapping[str, float] | None = None,
) -> None:
    """Draw a diagram of what is alive when: one ribbon a term, as high as the share of it that is there.

    `rows`: term -> [(time, share from 0 to 1), …], joined by straight lines; phase number i lasts from i to i + 1.
    `instants`: name -> time, each a vertical line through all ribbons.
    """
    looks = _looks(list(rows))
    for y, (term, points) in enumerate(rows.items()):
        times = [time for time, _ in points]
        colour, hatch = looks[term]
        ax.plot([0, len(phases)], [y + 0.38, y + 0.38], color=BAND, linewidth=1, zorder=1)
        tops = [y + 0.38 - 0.76 * share for _, share in points]
        ax.fill_between(times, y + 0.38, tops, color=colour, hatch=hatch, linewidth=0, zorder=2)
    for number, name in enumerate(phases):
        if number % 2 == 0:
            ax.axvspan(number, number + 1, color=BAND, linewidth=0, zorder=0)
        ax.text(number + 0.5, 1.01, name, transform=ax.get_xaxis_transform(), ha="center", va="bottom", fontsize=9)
    for name, time in (instants or {}).items():
        ax.axvline(time, color=INK, linestyle="--", linewidth=1, zorder=3)
        ax.text(time, -0.01, name, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=9)
    ax.set_yticks(range(len(rows)), [_words(term) for term in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, len(phases))
    ax.set_xticks([])
    ax.grid(False)
    ax.tick_params(axis="y", length=0)
    ax.spines[["left", "bottom"]].set_visible(False)


# --- shared by the figures above -----------------------------------------------------------------


def _looks(terms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour and hatch of its own for each term: plain colours first, then hatched ones.

    Raises ValueError for more terms than there are looks.
    """
    looks = {term: (TERM_COLOURS[term], "") for term in terms if term in TERM_COLOURS}
    others = [term for term in terms if term not in looks]
    free = [look for hatch in HATCHES for colour in PALETTE if (look := (colour, hatch)) not in looks.values()]
    if len(others) > len(free):
        raise ValueError(f"{len(terms)} terms in one figure, at most {len(HATCHES) * len(PALETTE)}: add some up")
    return looks | dict(zip(others, free, strict=False))


def _words(term: str) -> str:
    return term.replace("_", " ")


def _tokens(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _capacity_lines(ax: Axes, capacities: Mapping[str, int] | None, *, vertical: bool, unit: int = GIB) -> None:
    for label, n_bytes in (capacities or {}).items():
        look = {"color": INK, "linestyle": "--", "linewidth": 1}
        if vertical:
            ax.axvline(n_bytes / unit, **look)
            place = {"xy": (n_bytes / unit, 1), "xytext": (0, 3), "ha": "center", "va": "bottom"}
            ax.annotate(label, xycoords=ax.get_xaxis_transform(), textcoords="offset points", fontsize=9, **place)
        else:
            ax.axhline(n_bytes / unit, **look)
            place = {"xy": (0, n_bytes / unit), "xytext": (3, 2), "ha": "left", "va": "bottom"}
            ax.annotate(label, xycoords=ax.get_yaxis_transform(), textcoords="offset points", fontsize=9, **place)


def _name_inside(ax: Axes, term: str, segment: tuple[float, float, int], look: tuple[str, str]) -> bool:
    """Write the term's name into its widest segment if it fits there; return whether it did."""
    width, middle, y = segment
    red, green, blue = to_rgb(look[0])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
    text = ax.text(middle, y, _words(term), ha="center", va="center", fontsize=9, color=INK if bright else "white")
    text.set_zorder(TEXT_ZORDER)
    room = ax.transData.transform((width, 0))[0] - ax.transData.transform((0, 0))[0]
    if text.get_window_extent().width + 4 <= room and not look[1]:
        return True
    text.remove()
    return False


def _name_lines(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's label right of its end, moved up where two would overlap; above it where other lines go on."""
    ax.figure.draw_without_rendering()
    points_per_pixel = 72 / ax.figure.dpi
    last = max(x for x, *_ in ends)
    lowest_free = float("-inf")
    for x, y, label, colour in sorted(ends, key=lambda end: end[1]):
        if x < last:
            offset, align = (0, 7), {"ha": "center", "va": "bottom"}
        else:
            natural = ax.transData.transform((x, y))[1] * points_per_pixel
            placed = max(natural, lowest_free)
            lowest_free = placed + 11
            offset, align = (7, placed - natural), {"ha": "left", "va": "center"}
        look = {"color": colour, "fontsize": 9, "fontweight": "bold", "annotation_clip": False}
        ax.annotate(label, (x, y), offset, textcoords="offset points", **align, **look)
