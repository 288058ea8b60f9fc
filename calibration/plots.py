"""What do the fits look like beside the measurements? (one self-contained HTML page a profile)"""

from __future__ import annotations

from html import escape
from pathlib import Path

import numpy as np

from calibration import compute
from calibration.build import Bench
from calibration.models import measured, predict
from calibration.write import write_text

HEAD = "<!doctype html><meta charset='utf-8'><title>{title}</title><h1>{title}</h1>"


def write_plots(bench: Bench, gpu: str, folder: Path) -> Path:
    """Predicted against measured seconds of each GEMM and fused FFN kernel, and every collective curve. Returns the page."""
    import plotly.io

    figures = [_agreement(bench, gpu), _curves(bench, gpu)]
    parts = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=index == 0, div_id=f"{gpu}-{index}") for index, figure in enumerate(figures)
    ]
    path = folder / f"{gpu}.html"
    write_text(path, HEAD.format(title=f"Fits of {gpu}") + "".join(parts))
    return path


def write_measured(made, folder: Path) -> Path:
    """Predicted over measured seconds of every line of a fit from measurement files, noisy ones apart, and the curves. Returns the page."""
    import plotly.graph_objects as go
    import plotly.io

    from moesim.pricing import kernel

    profile, agreement, curves = made.profile, go.Figure(), go.Figure()
    for name in made.fitted:
        for noisy in (False, True):
            rows = [r for r in made.lines.terms[name] if r.noisy == noisy]
            if rows:
                seconds = np.array([r.seconds for r in rows])
                ratio = kernel(profile.term(name).kind, profile.num_sms, [r.op for r in rows])(profile.parameters(name, in_training=False)) / seconds
                agreement.add_scatter(x=seconds.tolist(), y=ratio.tolist(), mode="markers", name=name + (", noisy" if noisy else ""), text=[str(r.op) for r in rows],
                                      marker={"symbol": "circle-open" if noisy else "circle"})
    agreement.update_layout(title="predicted / measured, in sample", xaxis_type="log", xaxis_title="measured seconds", yaxis_title="ratio")
    for c in profile.curves:
        if c.software == profile.nccl and not c.lender:
            curves.add_scatter(x=list(c.bytes), y=list(c.seconds), name=f"{c.kind} over {c.members}")
    curves.update_layout(title="collectives", xaxis_type="log", yaxis_type="log", xaxis_title="bytes (nccl-tests size)", yaxis_title="seconds")
    parts = [plotly.io.to_html(f, full_html=False, include_plotlyjs=i == 0, div_id=f"measured-{i}") for i, f in enumerate((agreement, curves))]
    path = folder / f"{profile.name}.html"
    write_text(path, HEAD.format(title=f"Fits of {escape(profile.name)}") + "".join(parts))
    return path


def _agreement(bench: Bench, gpu: str):
    import plotly.graph_objects as go

    figure = go.Figure()
    num_sms = int(bench.sheets[gpu]["num_sms"])
    chosen = [(f"gemm {d}", compute.gemm_rows(bench.rows, g, d), r) for (g, d), r in bench.gemm.items() if g == gpu]
    chosen += [(f"fused FFN {key[1]} {key[2]}", rows, bench.ffn[key]) for key, rows in compute.ffn_groups(bench.rows).items() if key[0] == gpu]
    for name, rows, result in chosen:
        ratio = predict(result.parameters, num_sms, rows) / measured(rows)
        figure.add_scatter(x=measured(rows).tolist(), y=ratio.tolist(), mode="markers", name=name)
    figure.update_layout(title="predicted / measured, in sample", xaxis_type="log", xaxis_title="measured seconds", yaxis_title="ratio")
    return figure


def _curves(bench: Bench, gpu: str):
    import plotly.graph_objects as go

    figure = go.Figure()
    for kind, by_members in bench.curve_tables[gpu].items():
        for members, curve in by_members.items():
            figure.add_scatter(x=np.asarray(curve.bytes).tolist(), y=np.asarray(curve.seconds).tolist(), name=f"{kind} over {members}")
    figure.update_layout(title="collectives inside a domain", xaxis_type="log", yaxis_type="log", xaxis_title="bytes (nccl-tests size)", yaxis_title="seconds")
    return figure
