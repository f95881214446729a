# MSL with each of naga's helpers once: some differ by the address space of a pointer alone, of which the stand-in header knows none.
FNR == 1 { split("", seen) }
/^[^ ].*\) \{$/ {
    signature = $0
    gsub(/ (device|threadgroup|constant|thread) /, " ", signature)
    skipped = seen[signature]++
}
!skipped { print }
/^}$/ { skipped = 0 }
