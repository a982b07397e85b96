#!/usr/bin/env bash
# Runs one job to its end, as often as it takes; for cron, see docs/operations.md.
#
#   nightly.sh OUTPUT_DIR KEY=VALUE...
#
# What the run says goes to OUTPUT_DIR.log as JSON lines. The exit code is the job's.
set -uo pipefail

out=$1
shift
log=$out.log
mkdir -p "$(dirname "$out")"

# The run of an earlier tick may still be at work: then this one has nothing to do.
exec 9>"$out.lock"
flock --nonblock 9 || exit 0

child=
# Asked to stop, the job keeps what is finished and exits with 75.
trap '[[ -z $child ]] || kill -TERM "$child" 2>/dev/null' TERM INT

for attempt in 1 2 3; do
    "${PYTHON:-python}" -m batchgen "$@" output.dir="$out" log.format=json 2>>"$log" &
    child=$!
    wait "$child"
    code=$?
    # A signal ends the wait, not the job.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    case $code in
    0 | 2 | 3 | 75) break ;;
    esac
    # 1 and 4 may pass: a disk that was full, a device that hung.
    ((attempt == 3)) || sleep "${RETRY_S:-60}"
done
exit "$code"
