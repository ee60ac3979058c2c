#!/usr/bin/env bash
# Everything that needs GPUs, in one go and each part under a time limit: tests, kernels, the table of training steps.
#
#   benchmarks/gpu_session.sh [RESULTS_FOLDER] [PART...]      parts: check tests kernels quick large causal plan; default: the first four
#
# PYTHON=/path/to/python picks the environment. Logs and JSON go into the folder; a part that fails does not stop the next.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT_FOLDER=${1:-gpu_results}
shift || true
PARTS=${*:-check tests kernels quick}
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT_FOLDER"

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    [[ " $PARTS " == *" $name "* ]] || return 0
    echo "=== $name (at most $limit s)"
    local begin=$SECONDS
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT_FOLDER/$name.log"
    echo "=== $name: exit code ${PIPESTATUS[0]}, $((SECONDS - begin)) s"
}

part check 30 "$PYTHON" -c "import torch, triton; print(torch.__version__, triton.__version__, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])"
part tests 270 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider --durations=5 tests/gpu
part kernels 40 "$PYTHON" benchmarks/kernels.py --tune
part quick 560 "$PYTHON" benchmarks/train_step.py --quick --timeout 110 --json "$OUT_FOLDER/quick.json" --logs "$OUT_FOLDER/quick"
part large 560 "$PYTHON" benchmarks/train_step.py --sizes 8B --only single,fsdp2-c,fsdp2-best,zc3 --timeout 200 --json "$OUT_FOLDER/large.json" --logs "$OUT_FOLDER/large"
part causal 120 "$PYTHON" benchmarks/causal.py
part plan 580 "$PYTHON" benchmarks/plan_accuracy.py --calibrate "$OUT_FOLDER/here.json" --peers --measure-only "$OUT_FOLDER/rows.json" --logs "$OUT_FOLDER/plan"
