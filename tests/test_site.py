"""What do a site's factors change, and what do they leave alone?"""

import pytest

from moesim.evaluate import Evaluator
from moesim.site import NEUTRAL, PROXY_SECONDS, TERMS, Site
from small_scenarios import scenario

RUN = Site({"gemm": 1.2, "host": 0.5}, {"gemm": 0.75, "host": 1.0, "nic": 0.0}, ("one", "two"), (0.01, -0.01))


def test_an_unknown_site_changes_nothing():
    assert [NEUTRAL.factor(x) for x in ("gemm", "nic", "host", "end_of_step", "proxy", "anything")] == [1.0] * 6
    assert NEUTRAL.narrowing("gemm.bf16") == 1.0 and NEUTRAL.text == "" and NEUTRAL.proxy_seconds(8) == 0.0
    one, other = (Evaluator(scenario("moe"), site=site) for site in (NEUTRAL, Site({"gemm": 1.0, "host": 1.0})))
    layout = one.legal("dp8 ep8")
    assert one.program(layout) == other.program(layout)


def test_draws_narrow_by_what_anchors_taught():
    """1 - learned is the share of the variance that is left."""
    assert RUN.narrowing("gemm.bf16") == pytest.approx(0.5) and RUN.narrowing("grouped_gemm.fp8") == pytest.approx(0.5)
    assert RUN.narrowing("host") == 0.0 and RUN.narrowing("all_to_all.nic") == 1.0 and RUN.narrowing("memory.norm") == 1.0
    assert Site(learned={"gemm": 1.5}).narrowing("gemm.bf16") == 0.0


def test_every_mark_names_a_term_that_profiles_have():
    names = [t.name for t in Evaluator(scenario("moe")).profile.terms] + ["host"]
    for constant, marks in TERMS.items():
        assert any(mark in name for name in names for mark in marks), constant


def test_proxies_add_latency_only_where_tokens_leave_the_domain():
    proxy = Site({"proxy": 2.0}, proxy_dispatcher=True)
    assert [proxy.proxy_seconds(d) for d in (1, 2, 4)] == [0.0, pytest.approx(2 * PROXY_SECONDS / 3), pytest.approx(2 * PROXY_SECONDS)]
    plain, slow = (Evaluator(scenario("moe", num_nodes=2, stack="moetrain"), site=s) for s in (Site({"proxy": 0.0}, proxy_dispatcher=True), proxy))
    for text, extra in (("dp16 ep8 dedup", 0.0), ("dp16 ep16 dedup", 2 * PROXY_SECONDS / 3)):
        a, b = (e.parts.get("moe", e.legal(text)).comm["F"] for e in (plain, slow))
        assert b - a == pytest.approx(2 * extra, rel=1e-9, abs=1e-12)  # dispatch and combine


def test_the_end_of_the_step_scales_as_a_whole():
    def reduce_s(site):
        evaluator = Evaluator(scenario("moe"), site=site)
        program = evaluator.program(evaluator.legal("dp8 zero1 ov:none"))
        return sum(t.seconds for t in program.epilogue[0] if t.kind == "collective"), sum(t.seconds for t in program.epilogue[0] if t.kind != "collective")

    plain, slow = reduce_s(NEUTRAL), reduce_s(Site({"end_of_step": 3.0}))
    assert slow[0] == pytest.approx(3 * plain[0], rel=1e-9) and slow[1] == plain[1]


def test_the_report_says_what_anchored_it():
    assert RUN.text == "anchored by 2 run(s): gemm x1.20, host x0.50"
