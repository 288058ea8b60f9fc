#!/usr/bin/env bash
# What does one GPU machine tell about the trainer in nine minutes? Kernels against float64 and timed, then a cut seed model trained.
#
# Run from the repository's root: bash benchmarks/gpu.sh [folder for results, default calibration/measurements]
# Not run on a GPU yet. The kernels' part stops itself; the training step is cut off after two minutes and doesn't change the exit status of the first.
set -u
python=${PYTHON:-python3}
out=${1:-calibration/measurements}
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$python" -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ("torch", "triton", "typer"))))' || {
  echo "gpu.sh: $python has not all of torch, triton, typer; pip install -e '.[train]', or name another with PYTHON=" >&2
  exit 2
}
"$python" benchmarks/gpu_kernels.py --seconds 390 --out "$out"
kernels=$?
[ "$kernels" -eq 2 ] && exit 2

# The seed benchmark's layer widths, two layers deep with eight experts, so that one GPU holds it with its optimizer.
checkpoints=$(mktemp -d)
timeout 120 "$python" -m moetrain train olmo_core3_new --layout "mb1" \
  --set model.num_layers=2 --set model.num_experts=8 --set "workload.global_batch_tokens=16 Ki tokens" \
  --set train.steps=20 --set train.device=cuda --set train.dtype=bfloat16 \
  --set train.log.folder=runs/gpu_train --set train.checkpoint.folder="$checkpoints"
echo "train: exit status $?"
rm -r "$checkpoints"
exit "$kernels"
