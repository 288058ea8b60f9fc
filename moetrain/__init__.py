"""moetrain: pre-training of mixture-of-experts transformers whose every step can be explained. Imports nothing heavy by itself."""

from moesim import __version__ as __version__
