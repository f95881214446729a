#!/usr/bin/env bash
# Checks on one Linux machine without a GPU what other systems and devices will be given: `make test-portability`.
# usage: portability/run.sh [STEP...]    STEP is a file of portability/steps without its ending; all of them by default
#
# A step ends with 0 when it has shown what its first comment says, with 3 when this machine lacks something that it
# needs (it says what), and with anything else when it found a defect. What the steps have shown goes to
# docs/PORTABILITY.md, when all of them were asked for.
set -euo pipefail
cd "$(dirname "$0")/.."
source portability/lib.sh

if [ $# -gt 0 ]; then steps=("$@"); else mapfile -t steps <portability/steps.txt; fi
rm -rf "$WORK/evidence"
mkdir -p "$WORK/evidence" "$WORK/logs"

declare -A outcome
for step in "${steps[@]}"; do
    printf '%s ... ' "$step" >&2
    began=$SECONDS
    rm -f "$WORK/$step.why" "$WORK/$step.shown"
    status=0
    STEP=$step bash "portability/steps/$step.sh" >"$WORK/logs/$step.log" 2>&1 || status=$?
    case $status in
        0) outcome[$step]=shown ;;
        3) outcome[$step]='could not run' ;;
        *) outcome[$step]=FAILED ;;
    esac
    # What a step showed before it failed is not shown.
    [ "$status" = 0 ] || rm -f "$WORK/evidence/$step.tsv"
    echo "${outcome[$step]}, $((SECONDS - began)) s" >&2
done

failed=0
echo
for step in "${steps[@]}"; do
    echo "$step: ${outcome[$step]}"
    for said in "$WORK/$step.shown" "$WORK/$step.why"; do
        if [ -e "$said" ]; then sed 's/^/  /' "$said"; fi
    done
    if [ "${outcome[$step]}" = FAILED ]; then
        failed=1
        tail -n 20 "$WORK/logs/$step.log" | sed 's/^/  | /'
        echo "  all of it: $WORK/logs/$step.log"
    fi
done
echo
cat portability/limits.md

if [ $# = 0 ]; then
    python3 portability/report.py "$WORK" >docs/PORTABILITY.md
    echo 'written: docs/PORTABILITY.md'
fi
exit $failed
