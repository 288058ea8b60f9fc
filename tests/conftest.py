"""What do all tests share? (One BLAS thread a worker, where pytest-xdist already deals the files out to the cores.)"""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
