# A Wine that has graphics, and Microsoft's shader compiler FXC. Sourced after lib.sh, by the steps for DX12.
# shellcheck shell=bash

packages wine64 wine xvfb xauth gcc-mingw-w64-x86-64-win32
# The npm package of Dawn brings FXC for Dawn's own DX12 back end.
node_packages webgpu@0.6.2
FXC=$WORK/node/node_modules/webgpu/dist/win32-x64/d3dcompiler_47.dll
[ -e "$FXC" ] || cannot 'the npm package webgpu brings no d3dcompiler_47.dll'

# Wine's own d3dcompiler_47 cannot compile these shaders: `n` takes the one beside the program.
export WINEPREFIX=$WORK/wine/prefix WINEDEBUG=-all WINEDLLOVERRIDES=d3dcompiler_47=n
mkdir -p "$WORK/wine"
# A desktop that Wine started without a display would have no graphics adapter, so let it end.
xvfb-run -a wineboot -i
wineserver -w
