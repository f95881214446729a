#!/bin/sh
# Installs packages on Debian and its kin. Where that cannot be done, the reason goes to stdout and the exit code is 1; apt's
# own output goes to stderr, so that stdout stays with the program that is run next.
# usage: apt-install.sh WHY PACKAGE...
set -eu

give_up() {
    echo "$1"
    exit 1
}

why=$1
shift
command -v apt-get >/dev/null 2>&1 || give_up 'this system has no apt-get to install with'
if [ "$(id -u)" = 0 ]; then
    as_root='env'
elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    as_root='sudo -n env'
else
    give_up 'installing needs root (or sudo without a password)'
fi
echo "$why: installing $*" >&2
$as_root DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2 || give_up '`apt-get update` failed'
$as_root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 ||
    give_up '`apt-get install` failed'
