"""Do the triton kernels pass their tests in triton's interpreter? (its mode is fixed at import, so they run in a process of their own)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def run_interpreted(*options: str) -> None:
    """interpreted_kernels.py under TRITON_INTERPRET=1, one BLAS thread: with two, a busy machine makes it ten times slower."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "interpreted_kernels.py", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    done = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "[100%]" in done.stdout


def test_interpreted_kernels():
    run_interpreted()


@pytest.mark.full
def test_interpreted_kernels_with_every_config():
    run_interpreted("-m", "full")


def test_without_a_gpu_the_backend_refuses_in_one_line():
    """Outside the interpreter a CPU tensor has no kernel to run on."""
    pytest.importorskip("triton")
    script = """
import torch
from moetrain.kernels import backend
try:
    backend("triton", "cuda").grouped_gemm(torch.ones(2, 8), torch.ones(1, 4, 8), torch.tensor([2], dtype=torch.int32))
except ValueError as refusal:
    print(refusal)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    assert "needs a CUDA tensor" in told and told.count("\n") == 1
