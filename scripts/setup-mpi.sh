#!/bin/sh
# Makes sure that Open MPI and what its Rust binding is generated with are there: installs them on Debian and its kin.
# Exit code 1, with the reason, where that cannot be done.
set -eu

packages='openmpi-bin libopenmpi-dev libclang-dev clang'

usable() {
    command -v mpirun >/dev/null 2>&1 && command -v mpicc >/dev/null 2>&1 && command -v clang >/dev/null 2>&1
}

give_up() {
    echo "no MPI: $1; install Open MPI and clang (Debian: apt-get install $packages)" >&2
    exit 1
}

usable && exit 0
# shellcheck disable=SC2086
reason=$(sh "$(dirname "$0")/apt-install.sh" 'no MPI found' $packages) || give_up "$reason"
usable || give_up 'the packages did not bring it'
