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
    local package missing=() as_root=()
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || cannot "no apt-get to install ${missing[*]}"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || cannot "installing ${missing[*]} needs root, or sudo without a password"
        as_root=(sudo -n)
    fi
    # Lists of packages are kept for the steps that follow.
    [ -e "$WORK/apt-updated" ] || "${as_root[@]}" apt-get update -qq || cannot 'apt-get update failed'
    touch "$WORK/apt-updated"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
        cannot "apt-get cannot install ${missing[*]}"
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

# The shaders that the step `translate` leaves.
need_shaders() {
    [ -s "$SHADERS/variants.tsv" ] || cannot 'no shaders: the step translate comes first'
}

# evidence BACK_END TIER STAGE HOW: one cell of the table in docs/PORTABILITY.md.
evidence() {
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4" >>"$WORK/evidence/$STEP.tsv"
}

# evidence_for_variants BACK_END HOW NUMBER...: every stage and tier of these variants.
evidence_for_variants() {
    local back_end=$1 how=$2
    shift 2
    printf '%s\n' "$@" | sort -u | join -t $'\t' - <(sort "$SHADERS/variants.tsv") | cut -f2,3 | sort -u |
        while IFS=$'\t' read -r stage tiers; do
            for tier in ${tiers//,/ }; do evidence "$back_end" "$tier" "$stage" "$how"; done
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

# evidence_of_log LOG BACK_END HOW
evidence_of_log() {
    local lines
    lines=$(sed -nE 's/.*compiled ([a-z_0-9]+)\[.*\] on [a-z0-9]+, ([a-z]+) tier, .*/\1 \2/p' "$1" | sort -u)
    [ -n "$lines" ] || { echo "no pipeline was compiled: $1"; return 1; }
    while read -r stage tier; do evidence "$2" "$tier" "$stage" "$3"; done <<<"$lines"
}

# Tests that run kernels and compare what they compute, as arguments of `cargo test`.
kernel_tests() {
    local file
    for file in tests/kernels_*.rs; do echo --test "$(basename "$file" .rs)"; done
    echo --test layer --test logits
}

# run_tests NAME HOW [VARIABLE=VALUE...] -- ARGUMENT...: tests on Vulkan, with the stages that they compiled as evidence.
run_tests() {
    local log=$WORK/logs/$STEP-$1.log name=$1 how=$2 environment=()
    shift 2
    while [ "$1" != -- ]; do
        environment+=("$1")
        shift
    done
    shift
    (
        export "${environment[@]}"
        logged_cargo "$log" test --locked "$@"
    )
    evidence_of_log "$log" vulkan "$how"
    shown "$name: $(tests_passed "$log") tests"
}
