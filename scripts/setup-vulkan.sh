#!/bin/sh
# Makes sure that Linux has a Vulkan device: where none is found, installs the loader and Mesa's drivers (which
# include llvmpipe, a device in software). Elsewhere the system brings Metal or DirectX and nothing is done.
# usage: setup-vulkan.sh [PROGRAM]   PROGRAM is a built wgmoe, which is asked for its devices
set -eu

program=${1:-}
packages='libvulkan1 mesa-vulkan-drivers'

[ "$(uname -s)" = Linux ] || exit 0

usable() {
    if [ -n "$program" ]; then
        "$program" devices --format json >/dev/null 2>&1
        return
    fi
    PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q 'libvulkan\.so\.1' || return 1
    for driver in ${VK_DRIVER_FILES:-} ${VK_ICD_FILENAMES:-} /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json; do
        [ -e "$driver" ] && return 0
    done
    return 1
}

give_up() {
    {
        echo "error: no Vulkan device found, and $1"
        echo 'Install the Vulkan loader and a driver, then try again:'
        echo "  Debian, Ubuntu:  sudo apt-get update && sudo apt-get install $packages"
        echo '  Fedora:          sudo dnf install vulkan-loader mesa-vulkan-drivers'
        echo '  Arch:            sudo pacman -S vulkan-icd-loader vulkan-swrast'
    } >&2
    exit 1
}

usable && exit 0

# shellcheck disable=SC2086
reason=$(sh "$(dirname "$0")/apt-install.sh" 'no Vulkan device found' $packages) || give_up "$reason"
usable || give_up "installing $packages did not bring one"
