// Wine 8 has no bcryptprimitives.dll, from which Rust's standard library takes random numbers.
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T n) { return SystemFunction036(bytes, (ULONG)n); }
