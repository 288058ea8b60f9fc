"""moesim: a discrete-event simulator and layout planner for mixture-of-experts training."""

__version__ = "0.1.0"
