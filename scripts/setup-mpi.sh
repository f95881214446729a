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
command -v apt-get >/dev/null 2>&1 || give_up 'this system has no apt-get to install it with'
if [ "$(id -u)" = 0 ]; then
    as_root='env'
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root='sudo -n env'
else
    give_up 'installing it needs root (or sudo without a password)'
fi
echo "no MPI found: installing $packages" >&2
$as_root DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2 || give_up 'apt-get update failed'
# shellcheck disable=SC2086
$as_root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >&2 ||
    give_up 'apt-get install failed'
usable || give_up 'the packages did not bring it'
