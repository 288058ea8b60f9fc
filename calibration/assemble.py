"""What goes into the profile of one GPU? (terms, curves, sustained rates, host and co-run figures)"""

from __future__ import annotations

from calibration import constants, network, pointwise, training
from calibration.build import PARENTS, Bench
from calibration.terms import terms
from moesim.profile import Gamma, HardwareProfile, Host, Sustained

DTYPES = ("bf16", "fp32", "fp8", "fp8_block", "mxfp8", "nvfp4")


def profile(bench: Bench, gpu: str) -> HardwareProfile:
    """The profile of one GPU from all shipped rows. Deterministic."""
    sheet = bench.sheets[gpu]
    curves = network.curves(gpu, bench.rows, bench.sheets)
    level = sustained(bench, gpu)
    found = tuple(with_causes(term, level) for term in terms(bench, gpu))
    return HardwareProfile(
        name=gpu, gpu=gpu.upper(), parent=PARENTS.get(gpu), num_sms=int(sheet["num_sms"]),
        peak_flops={p: sheet[p] for p in ("bf16", "fp8", "fp4") if p in sheet}, hbm_bytes_per_s=sheet["hbm"],
        nvlink_bytes_per_s=sheet["nvlink"], collective_sms=constants.COLLECTIVE_SMS,
        datasheet_sources=tuple(part.strip() for part in sheet["source"].split(" ; ")), terms=found,
        nccl=(network.releases(gpu, bench.rows) or [curves[0].software])[0], curves=curves,
        sustained_rule=" ".join(training.__doc__.split("\n\n")[1].split()), sustained=level,
        host=Host(**constants.HOST), gammas=tuple(Gamma(running=r, beside=b, gamma=g, stderr=e, source=s) for r, b, g, e, s in constants.GAMMAS),
    )


def sustained(bench: Bench, gpu: str) -> dict[str, Sustained]:
    """In-training level by dtype, and of attention."""
    owner = PARENTS.get(gpu, gpu)
    tensor = Sustained(**training.sustained(owner, bench.rows, bench.dense, bench.sheets))
    share, sigma, provenance = pointwise.in_step_share(gpu, bench.attention_parameters, bench.sheets)
    steps = [r for g in ("h200", "b200") for r in pointwise.attention_rows(g, "in_step")]
    core = Sustained(factor=share, sigma_log=sigma, provenance=provenance, evidence={"in step": share}, sources=tuple(sorted({r["source"] for r in steps})))
    return {**{dtype: tensor for dtype in DTYPES}, "attention": core}


def with_causes(term, level):
    """Fill in how far a term moves with the sustained level it is priced at."""
    cause = "attention" if term.kind == "attention" else "bf16"
    name = "attention" if term.kind == "attention" else "sustained"
    if name not in term.shared:
        return term
    return term.model_copy(update={"shared": {**term.shared, name: level[cause].sigma_log}})
