#!/usr/bin/env bash
# Checks on one Linux machine without a GPU what other systems and devices will be given: `make test-portability`.
# usage: portability/run.sh [--continue] [STEP...]    STEP is a file of portability/steps without its ending; all of them by
# default. --continue: but those that this very tree has passed already, of a run that was cut short or of single steps.
#
# A step ends with 0 when it has shown what its first comment says, with 3 when this machine lacks something that it
# needs (it says what), and with anything else when it found a defect. What the steps have shown goes to
# docs/PORTABILITY.md, when all of them were asked for.
#
# A new stage needs nothing here: rows of the table come from src/kernels/variants.rs, what is compiled and linted from the
# same list, what has run from the logs of the tests, and what is repeated in a browser and on the CPU from every
# tests/kernels_*.rs (tests/common/traced.rs). Three things are kept by hand: a new step goes into steps.txt; a builtin or
# function of MSL that no stage has used so far into msl/shim/metal_stdlib, and an argument of a kernel into
# msl/replay.py; and a tier that a back end never has into NO_SUCH_TIER of report.py. Each of them fails when forgotten.
set -euo pipefail
cd "$(dirname "$0")/.."
source portability/lib.sh

continued=
if [ "${1:-}" = --continue ]; then continued=yes && shift; fi
if [ $# -gt 0 ]; then steps=("$@"); else mapfile -t steps <portability/steps.txt; fi
mkdir -p "$WORK/evidence" "$WORK/logs"

declare -A outcome
for step in "${steps[@]}"; do
    printf '%s ... ' "$step" >&2
    if [ -n "$continued" ] && passed "$step"; then
        outcome[$step]='shown before'
        echo "${outcome[$step]}" >&2
        continue
    fi
    began=$SECONDS tree=$(tree_of "$step")
    rm -f "$WORK/$step.why" "$WORK/$step.shown" "$WORK/evidence/$step".*
    status=0
    STEP=$step bash "portability/steps/$step.sh" >"$WORK/logs/$step.log" 2>&1 || status=$?
    case $status in
        0) outcome[$step]=shown ;;
        3) outcome[$step]='could not run' ;;
        *) outcome[$step]=FAILED ;;
    esac
    # What a step showed before it failed is not shown.
    if [ "$status" = 0 ]; then echo "$tree" >"$WORK/evidence/$step.passed"; else rm -f "$WORK/evidence/$step.tsv"; fi
    echo $((SECONDS - began)) >"$WORK/evidence/$step.seconds"
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
    python3 portability/report.py "$WORK" >"$WORK/PORTABILITY.md"
    mv "$WORK/PORTABILITY.md" docs/PORTABILITY.md
    echo 'written: docs/PORTABILITY.md'
fi
exit $failed
