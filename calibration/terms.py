"""Which priced terms does one GPU have, and with what error and provenance? (fits and publications -> Term)"""

from __future__ import annotations

from typing import Iterator

import numpy as np

from calibration import compute, constants, network, pointwise, splits, validate
from calibration.build import PARENTS, Bench
from calibration.models import measured, predict
from moesim.costs import attention, collectives, dispatch, fused_ffn, gemm, grouped_gemm, memory_bound
from moesim.profile import Fit, Term

SCALED_SIGMA = 0.15
"""Error added by carrying a kernel to another GPU through datasheet ratios: B300's parameters miss the other GPUs' tables by a median
of 8-14% (`unseen GPU` in held_out.py)."""
NETWORK_SIGMA = 0.25
"""Error of a leg over the fabric: the all-reduces of a dozen systems scatter by a median of 18-24% around one set of parameters a
transport (held_out.py), and no two fabrics are tuned alike."""
PARAMETERS = {"gemm": gemm, "grouped_gemm": grouped_gemm, "fused_ffn": fused_ffn, "attention": attention, "dispatch": dispatch}


def scaled(parameters: dict[str, float], kind: str, base: dict, sheet: dict, dtype: str = "bf16") -> dict[str, float]:
    """Parameters of one GPU carried to another by the datasheet figure each is proportional to."""
    peak = compute.PEAK_OF.get(dtype, "bf16")
    ratio = {"flops": sheet[peak] / base[peak], "hbm": sheet["hbm"] / base["hbm"], "nvlink": sheet["nvlink"] / base["nvlink"]}
    declared = {p.name: p.scales for module in (PARAMETERS[kind], gemm) for p in module.PARAMETERS}
    return {name: value * ratio.get(declared.get(name, ""), 1.0) for name, value in parameters.items()}


def ranges(rows, axes) -> dict[str, tuple[float, float]]:
    return {axis: (min(r.shape[axis] for r in rows), max(r.shape[axis] for r in rows)) for axis in axes}


def sources(rows) -> tuple[str, ...]:
    return tuple(sorted({r.source for r in rows}))


def gemm_fits(bench: Bench, gpu: str, dtype: str) -> tuple[tuple[Fit, ...], float]:
    """Errors in sample and by each split, and the sigma of the residuals with whole families held out."""
    rows = compute.gemm_rows(bench.rows, gpu, dtype)
    truth = measured(rows)
    found = [validate.errors(predict(bench.gemm[gpu, dtype].parameters, int(bench.sheets[gpu]["num_sms"]), rows), truth, "in sample")]
    sigma = 0.0
    for split in splits.SPLITS:
        held = bench.out_of_fold_gemm(gpu, dtype, split)
        found.append(validate.errors(held, truth, split))
        sigma = validate.sigma_of(held, truth) if split == "families" else sigma
    return tuple(found), sigma


def gemm_terms(bench: Bench, gpu: str) -> Iterator[Term]:
    owner = PARENTS.get(gpu, gpu)
    for dtype in compute.KERNELS:
        if (owner, dtype) not in bench.gemm:
            continue
        result, rows = bench.gemm[owner, dtype], compute.gemm_rows(bench.rows, owner, dtype)
        fits, sigma = gemm_fits(bench, owner, dtype)
        parameters, own = result.parameters, owner == gpu
        if not own:
            parameters, sigma = scaled(parameters, "gemm", bench.sheets[owner], bench.sheets[gpu], dtype), float(np.hypot(sigma, SCALED_SIGMA))
        main = Term(
            name=f"gemm.{dtype}", kind="gemm", label=rows[0].kernel, parameters=parameters, stderr=result.stderr, covariance=result.covariance,
            valid=ranges(rows, "mnk"), provenance="measured" if own else "extrapolated", sigma_log=sigma, shared={"sustained": 0.0},
            sources=sources(rows), fits=fits if own else (), note="" if own else f"{owner} scaled by datasheet ratios",
        )
        yield main
        yield from _derived(bench, gpu, dtype, main)
    for (owner, dtype, kernel), result in bench.other_kernels.items():
        if owner == gpu:
            rows = [r for r in bench.rows if (r.kind, r.gpu, r.dtype, r.kernel) == ("gemm", owner, dtype, kernel)]
            fit = validate.errors(predict(result.parameters, int(bench.sheets[owner]["num_sms"]), rows), measured(rows), "in sample")
            yield Term(name=f"gemm_kernel.{dtype}.{kernel}", kind="gemm", label=kernel, parameters=result.parameters, stderr=result.stderr,
                       valid=ranges(rows, "mnk"), provenance="measured", sigma_log=result.sigma_log, sources=sources(rows), fits=(fit,))


def _derived(bench: Bench, gpu: str, dtype: str, main: Term) -> Iterator[Term]:
    """Weight gradient and grouped forms of a dense kernel, and the dtypes that have no table."""
    forms = [(dtype, main.parameters, main.provenance, main.sigma_log, main.note)]
    if dtype == "bf16":
        halved = {**main.parameters, "rate": main.parameters["rate"] / 2}
        forms.append(("fp32", halved, "assumed", 0.3, "TF32 at half the bf16 rate"))
    if dtype == "fp8":
        forms.append(("mxfp8", main.parameters, "extrapolated", float(np.hypot(main.sigma_log, SCALED_SIGMA)), "the fp8 kernel"))
    grouped, rows, predicted = bench.grouped
    spread = validate.sigma_of(predicted, measured(rows))
    for name, parameters, provenance, sigma, note in forms:
        common = dict(shared={"sustained": 0.0}, sources=tuple(sorted(set(main.sources) | set(sources(rows)))))
        if name != dtype:
            yield Term(name=f"gemm.{name}", kind="gemm", parameters=parameters, provenance=provenance, sigma_log=sigma, note=note, **common)
        weight = {**parameters, "rate": parameters["rate"] * weight_gradient_share(bench)}
        yield Term(name=f"gemm.wgrad.{name}", kind="gemm", parameters=weight, provenance="extrapolated", sigma_log=float(np.hypot(sigma, 0.05)),
                   note="forward kernel, slowed as B200 weight gradients are in training", **common)
        for kind in ("", "wgrad."):
            known = gpu == "b200" and name == "bf16"
            yield Term(name=f"grouped_gemm.{kind}{name}", kind="grouped_gemm", parameters={**parameters, **grouped.parameters}, stderr=grouped.stderr,
                       valid={"rows_per_group": (128.0, 9832.0)} if known else {}, provenance="measured" if known else "extrapolated",
                       sigma_log=float(np.hypot(sigma, spread)), note="dense kernel of this GPU dealt over groups as B200 does in training", **common)


def weight_gradient_share(bench: Bench) -> float:
    """Rate of dense FP32-accumulating weight gradients over that of forward GEMMs, B200 in training, large shapes."""
    rows = [r for r in bench.rows if r.kind == "gemm.in_training" and 2 * r.shape["m"] * r.shape["n"] * r.shape["k"] >= 5e11]
    speed = predict(bench.dense["b200"], int(bench.sheets["b200"]["num_sms"]), rows) / measured(rows)
    accumulate = np.array([r.shape["accumulate"] > 0 for r in rows])
    return float(np.median(speed[accumulate]) / np.median(speed[~accumulate]))


def ffn_terms(bench: Bench, gpu: str) -> Iterator[Term]:
    found = bench.ffn_out_of_fold
    for key, members in compute.ffn_groups(bench.rows).items():
        if key[0] != gpu:
            continue
        result, truth = bench.ffn[key], measured(members)
        fits = [validate.errors(bench.predict_ffn(bench.ffn, members), truth, "in sample")]
        for split, (rows, held) in found.items():
            mine = np.array([(r.gpu, r.dtype, r.kernel) == key for r in rows]) & np.isfinite(held)
            if mine.any():
                fits.append(validate.errors(held[mine], measured(rows)[mine], split))
        yield Term(name=f"fused_ffn.{key[1]}.{key[2]}", kind="fused_ffn", label=key[2], parameters=result.parameters, stderr=result.stderr,
                   covariance=result.covariance, valid=ranges(members, ("tokens", "hidden", "inter", "experts")), provenance="measured",
                   sigma_log=max(result.sigma_log, fits[1].median * 1.4826) if len(fits) > 1 else result.sigma_log, sources=sources(members), fits=tuple(fits))


def attention_terms(bench: Bench, gpu: str) -> Iterator[Term]:
    parameters = bench.attention_parameters(gpu)
    lent = gpu not in bench.attention
    owner = pointwise.ATTENTION_LENDER.get(gpu, gpu)
    rows = pointwise.attention_rows(owner, "forward")
    trace = tuple(r["source"] for r in pointwise.attention_rows("h800", "forward"))
    origin = tuple(sorted({r["source"] for r in rows}))
    fit = () if lent else (validate.errors(
        1 / pointwise.predict_attention(parameters, int(bench.sheets[gpu]["num_sms"]), rows), 1 / np.array([float(r["tflops"]) for r in rows]), "in sample"),)
    sigma = bench.attention[owner].sigma_log if not lent else float(np.hypot(bench.attention[owner].sigma_log, SCALED_SIGMA))
    valid = {"keys": (512.0, 16384.0)}
    yield Term(name="attention.forward", kind="attention", parameters=parameters, stderr=bench.attention[owner].stderr, valid=valid,
               provenance="extrapolated" if lent else "measured", sigma_log=max(sigma, 0.03), shared={"attention": 0.0}, sources=origin + trace, fits=fit)
    yield Term(name="attention.backward", kind="attention", parameters=parameters, valid=valid, provenance="measured" if gpu == "h800" else "extrapolated",
               sigma_log=float(np.hypot(sigma, 0.1)), shared={"attention": 0.0}, sources=origin + trace, note="backward over forward of one H800 trace")


def memory_terms(bench: Bench, gpu: str) -> Iterator[Term]:
    parameters = pointwise.memory_parameters(gpu, bench.sheets)
    table = pointwise.table("memory")
    for kind in memory_bound.KINDS:
        stands = pointwise.IN_TRAINING[kind]
        owner = pointwise.COPY_LENDER.get(gpu, gpu) if stands == "copy" else "b200"
        origin = tuple(sorted({r["source"] for r in table if r["gpu"] == owner and r["kind"] == stands}))
        known = owner == gpu and stands == kind
        yield Term(name=f"memory.{kind}", kind="memory_bound", parameters=parameters, provenance="measured" if known else "extrapolated",
                   sigma_log=0.1 if known else 0.2, shared={"memory": 0.1}, sources=origin, note="" if known else f"{stands} on {owner}")


def collective_terms(bench: Bench, gpu: str) -> Iterator[Term]:
    own = [c for c in network.curves(gpu, bench.rows, bench.sheets) if not c.lender]
    rows = network.curve_rows(gpu if own else network.SIBLING[gpu], bench.rows)
    for kind in collectives.KINDS[:-1]:
        fits = network.interpolation_errors([c for c in own if c.kind == kind])
        valid = {"bytes": (min(r.shape["bytes"] for r in rows), max(r.shape["bytes"] for r in rows)), "members": (2.0, 8.0 if gpu not in network.DOMAIN else 4.0)}
        yield Term(name=f"{kind}.nvlink", kind="collectives", valid=valid, provenance="measured" if own else "extrapolated",
                   sigma_log=fits[0].p90 / 1.645 if fits else 0.15, shared={"nvlink": 0.05}, sources=sources(rows), fits=fits)
        yield Term(name=f"{kind}.nic", kind="collectives", provenance="extrapolated", sigma_log=NETWORK_SIGMA, shared={"network": 0.1},
                   sources=sources(bench.span["ib"][1] + bench.span["efa"][1]))
    pair = "https://github.com/stas00/ml-engineering/blob/744d01e18b/network/README.md"
    for leg, sigma in (("nvlink", 0.1), ("nic", NETWORK_SIGMA)):
        yield Term(name=f"send_recv.{leg}", kind="collectives", provenance="extrapolated", sigma_log=sigma, shared={"network" if leg == "nic" else "nvlink": 0.05}, sources=(pair,))
    for transport, (result, chosen, predicted) in bench.span.items():
        yield Term(name=f"network.{transport}", kind="collectives", parameters=result.parameters, stderr=result.stderr, covariance=result.covariance,
                   provenance="extrapolated", sigma_log=validate.sigma_of(predicted, measured(chosen)), sources=sources(chosen),
                   fits=(validate.errors(predicted, measured(chosen), "in sample"),))


def dispatch_terms(bench: Bench, gpu: str) -> Iterator[Term]:
    sheet = bench.sheets[gpu]
    rates, papers = network.modern_dispatcher()
    modern = scaled({**rates, "copy_bytes": 1.0, "relay": 1.0, "fixed_s": constants.PUT_S}, "dispatch", bench.sheets["b200"], sheet)
    called = {**modern, "fixed_s": constants.DISPATCH_CALL_S}
    first = gpu if gpu in bench.dispatch else PARENTS.get(gpu, "h100")
    fitted = scaled(bench.dispatch[first].parameters, "dispatch", bench.sheets[first], sheet)
    rows = network.dispatch_rows(first, bench.rows)
    error = validate.errors(network.predict_dispatch(bench.dispatch[first].parameters, rows, bench.sheets[first]["nvlink"]), measured(rows), "in sample")
    leg = {"relay": bench.dispatch["h100"].parameters["relay"]}
    for name, parameters, origin in (("dedup", called, (*papers, constants.HYBRID_EP)), ("sync_free", modern, (*papers, constants.GIN))):
        yield Term(name=f"dispatch.{name}", kind="dispatch", parameters=parameters, provenance="extrapolated", sigma_log=0.25, shared={"nvlink": 0.05}, sources=origin)
    own = gpu in bench.dispatch
    yield Term(name="dispatch.dedup_v1", kind="dispatch", label="DeepEP V1", parameters={**fitted, **leg}, stderr=bench.dispatch[first].stderr,
               valid={"members": (4.0, 8.0)}, provenance="measured" if own else "extrapolated", sigma_log=error.p90 / 1.645, shared={"nvlink": 0.05}, sources=sources(rows), fits=(error,))
    for transport in ("ib", "efa"):
        share, spread, origin = network.nic_share(transport)
        late = {"nic_efficiency": share, "network_s": bench.dispatch["h100"].parameters["network_s"]}
        yield Term(name=f"dispatch.nic.{transport}", kind="dispatch", parameters=late, provenance="extrapolated",
                   sigma_log=float(np.hypot(spread, NETWORK_SIGMA)), shared={"network": 0.1}, sources=origin)


def terms(bench: Bench, gpu: str) -> tuple[Term, ...]:
    """Every term of one GPU, in a fixed order."""
    makers = (gemm_terms, ffn_terms, attention_terms, memory_terms, collective_terms, dispatch_terms)
    return tuple(term for make in makers for term in make(bench, gpu))
