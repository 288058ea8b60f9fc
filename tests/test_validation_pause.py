"""Does the watchdog let validation take its time?"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from moetrain import train


def test_validation_is_no_hang(monkeypatch):
    now: list[str] = []

    @contextmanager
    def paused(reason):
        now.append(reason)
        yield
        now.remove(reason)

    def loss(job, loader, sequences):
        assert now == ["validation"]
        return 1.5

    monkeypatch.setattr(train.step, "validation_loss", loss)
    scenario = SimpleNamespace(train=SimpleNamespace(data=SimpleNamespace(validation=SimpleNamespace(sequences=8))))
    events = []
    run = SimpleNamespace(paused=paused, job=None, loader=None, scenario=scenario, losses={}, done=3, log=SimpleNamespace(event=lambda *a, **k: events.append((a, k))))
    assert train.validate(run) == 1.5 and run.losses == {"validation": 1.5} and events and not now
