# What the steps share. Sourced, from the root of the repository.
# shellcheck shell=bash

export NODEVICE_SELECT=1
WORK=${WGMOE_PORTABILITY_DIR:-$PWD/target/portability}
mkdir -p "$WORK"
SHADERS=$WORK/shaders
# Vulkan drivers in software.
export LLVMPIPE=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json
export SWIFTSHADER=/usr/lib/chromium/vk_swiftshader_icd.json

# Cargo, behind a command that waits for a turn where this machine is shared (PORTABILITY_TURN).
read -ra cargo <<<"${PORTABILITY_TURN:-} cargo"

# Ends the step: this machine lacks something.
cannot() {
    echo "$*" >>"$WORK/$STEP.why"
    echo "cannot: $*"
    exit 3
}

# Ends the step with an error unless the command fails: a check that cannot fail shows nothing.
must_fail() {
    if "$@"; then
        echo "expected to fail: $*"
        exit 1
    fi
}

# One line for the summary.
shown() {
    echo "$*" | tee -a "$WORK/$STEP.shown"
}

# Installs Debian packages that are missing.
packages() {
    local package missing=() reason
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    reason=$(sh scripts/apt-install.sh "$STEP" "${missing[@]}") || cannot "${missing[*]}: $reason"
}

# A Python package in a folder of its own, whose path it sets as `python_folder`.
python_package() {
    python_folder=$WORK/python/$1
    [ -d "$python_folder" ] ||
        python3 -m pip install --quiet --no-deps --target "$python_folder" "$1" ||
        { rm -rf "$python_folder"; cannot "pip cannot install $1"; }
}

# npm packages, in $WORK/node.
node_packages() {
    command -v npm >/dev/null || packages npm
    mkdir -p "$WORK/node"
    (cd "$WORK/node" && npm install --ignore-scripts --no-audit --no-fund --loglevel error "$@") ||
        cannot "npm cannot install $*"
}

# A digest of all that a step's evidence can depend on: every file but documents and other steps.
tree_of() {
    local others=(':!docs' ':!*.md' ':!portability/steps*' ':!portability/run.sh' ':!portability/report.py')
    {
        git ls-files --cached --others --exclude-standard -z -- . "${others[@]}" | xargs -0 sha256sum
        [ -z "$1" ] || sha256sum "portability/steps/$1.sh"
    } | sha256sum | cut -d' ' -f1
}

# Whether the step has been shown for this tree.
passed() {
    [ "$(cat "$WORK/evidence/$1.passed" 2>/dev/null)" = "$(tree_of "$1")" ]
}

# The shaders that the step `translate` leaves.
need_shaders() {
    passed translate || cannot 'no shaders of this tree: the step translate comes first'
}

# What other programs repeat, from llvmpipe: a layer in $WORK/layer.json, and in $WORK/stages runs of every stage that a
# kernel test runs.
need_traces() {
    local file tests=()
    [ "$(cat "$WORK/traced" 2>/dev/null)" != "$(tree_of "")" ] || return 0
    packages libvulkan1 mesa-vulkan-drivers
    rm -rf "$WORK/stages"
    for file in tests/kernels_*.rs; do tests+=(--test "$(basename "$file" .rs)"); done
    VK_ICD_FILENAMES=$LLVMPIPE WGMOE_TRACE=$WORK/layer.json "${cargo[@]}" test --locked --test trace
    VK_ICD_FILENAMES=$LLVMPIPE WGMOE_TRACE_STAGES=$WORK/stages "${cargo[@]}" test --locked "${tests[@]}"
    tree_of "" >"$WORK/traced"
}

# evidence BACK_END TIER STAGE KIND HOW: one piece of evidence for a cell of the table in docs/PORTABILITY.md. KIND is
# `ran` (on a driver that people use, or on one that only computes in software), `stand-in` (ran on something that poses
# as the back end) or `checked` (translated, compiled, linted; not run).
evidence() {
    printf '%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" "$5" >>"$WORK/evidence/$STEP.tsv"
}

# evidence_for_variants BACK_END KIND HOW NUMBER...: every stage and tier of these variants.
evidence_for_variants() {
    local back_end=$1 kind=$2 how=$3 tier
    shift 3
    printf '%s\n' "$@" | sort -u | join -t $'\t' - <(sort "$SHADERS/variants.tsv") | cut -f2,3 | sort -u |
        while IFS=$'\t' read -r stage tiers; do
            for tier in ${tiers//,/ }; do evidence "$back_end" "$tier" "$stage" "$kind" "$how"; done
        done
}

# Cargo with the log line from which `evidence_of_log` knows what was compiled and, in tests that passed, has run.
logged_cargo() {
    local log=$1
    shift
    RUST_LOG=${RUST_LOG:-wgmoe::kernels::linker=debug} "${cargo[@]}" "$@" >"$log" 2>&1 || {
        grep -aE 'panicked|^error|FAILED|failed' "$log" | head -n 40
        return 1
    }
}

# How many tests a log of cargo says have passed.
tests_passed() {
    sed -nE 's/^test result: ok\. ([0-9]+) passed.*/\1/p' "$1" | awk '{ n += $1 } END { print n + 0 }'
}

# evidence_of_log LOG DEVICE BACK_END KIND HOW: what was compiled on a device whose description matches DEVICE, an
# extended regular expression for `back end, name`. Pipelines of another device are an error: it is not the one meant.
# wgpu's noop device computes nothing and counts for nothing.
evidence_of_log() {
    local lines other
    lines=$(grep -av ' on noop, ' "$1" | sed -nE "s/.*compiled ([a-z_0-9]+)\[.*\] on ([a-z0-9]+), ([a-z]+) tier, (.*)/\1 \3 \2, \4/p" | tr -d '\r' | sort -u)
    [ -n "$lines" ] || { echo "no pipeline was compiled: $1"; return 1; }
    other=$(grep -vE "^[a-z_0-9]+ [a-z]+ $2" <<<"$lines" | head -n 1) || true
    [ -z "$other" ] || { echo "a pipeline for another device than $2: $other ($1)"; return 1; }
    while read -r stage tier _; do evidence "$3" "$tier" "$stage" "$4" "$5"; done <<<"$lines"
}

# Fails unless the demonstration's answers were compared in this log of cargo.
demo_right() {
    grep -aq '^test thirty_greedy_answers_in_one_batch_equal_the_reference_token_for_token \.\.\. ok' "$1"
}

# Tests that run kernels and compare what they compute, one line for each argument of `cargo test`.
kernel_tests() {
    local file
    for file in tests/kernels_*.rs tests/{layer,logits,demo}.rs; do printf '%s\n' --test "$(basename "$file" .rs)"; done
}

# Every test that opens a device.
device_tests() {
    local file
    grep -l 'common/device.rs' tests/*.rs | while read -r file; do printf '%s\n' --test "$(basename "$file" .rs)"; done
}

# run_tests NAME DEVICE HOW [VARIABLE=VALUE...] -- ARGUMENT...: tests on Vulkan, with the stages that they compiled as
# evidence. DEVICE as for `evidence_of_log`.
run_tests() {
    local log=$WORK/logs/$STEP-$1.log name=$1 device=$2 how=$3 environment=()
    shift 3
    while [ "$1" != -- ]; do
        environment+=("$1")
        shift
    done
    shift
    (
        export "${environment[@]}"
        logged_cargo "$log" test --locked "$@"
    )
    evidence_of_log "$log" "$device" vulkan ran "$how"
    demo_right "$log"
    shown "$name: $(tests_passed "$log") tests, and the demonstration's thirty answers right"
}
