"""What do a site's factors change, and what do they leave alone?"""

import pytest

from moesim.evaluate import Evaluator
from moesim.site import NEUTRAL, PROXY_SECONDS, Site, same_model
from small_scenarios import scenario

RUN = Site({"gemm": 1.2, "host": 0.5}, ("one", "two"), (0.01, -0.01))


def test_an_unknown_site_changes_nothing():
    assert [NEUTRAL.factor(x) for x in ("gemm", "nic", "host", "end_of_step", "proxy", "anything")] == [1.0] * 6
    assert NEUTRAL.text == "" and NEUTRAL.proxy_seconds(8) == 0.0
    one, other = (Evaluator(scenario("moe"), site=site) for site in (NEUTRAL, Site({"gemm": 1.0, "host": 1.0})))
    layout = one.legal("dp8 ep8")
    assert one.program(layout) == other.program(layout)


def test_the_factor_of_a_model_scales_its_whole_step_and_no_other_models():
    model = scenario("moe").model
    for name, factor in ((model.name, 1.25), ("another name for it", 1.25), (model.name, 0.8)):
        site = Site({f"model {name}": factor}, models={same_model(model.model_copy(update={"name": name})): f"model {name}"})
        plain, scaled = (Evaluator(scenario("moe", stack="moetrain"), site=s) for s in (NEUTRAL, site))
        for text in ("dp8 ep8", "pp2 dp4 ep4 zero1 ov:grad"):
            one, other = (e.played(e.legal(text)).step_s - e.stack.end_of_step_s for e in (plain, scaled))
            assert other == pytest.approx(factor * one, rel=1e-3)
        assert Evaluator(scenario("dense"), site=site).parts.site_factor == 1.0


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
