//! The header of a safetensors file, checked against the size of the file so that no later view can fail.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};

use super::untrusted::shown;
use crate::dtype::DType;

/// Largest header, in bytes; the format's own limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the little-endian header length in front of the header.
const LENGTH_BYTES: usize = 8;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The storage type, or the name of one that is valid in the format but not readable here.
    pub(crate) dtype: Result<DType, &'static str>,
    /// Sizes, slowest dimension first.
    pub(crate) shape: Vec<usize>,
    /// First byte of the data, from the start of the file.
    pub(crate) begin: usize,
    /// One past the last byte of the data, from the start of the file.
    pub(crate) end: usize,
}

/// Every storage type of the format: name, bits of one element, and ours when it is one we read.
const TYPES: [(&str, u64, Option<DType>); 22] = [
    ("F32", 32, Some(DType::F32)),
    ("F16", 16, Some(DType::F16)),
    ("BF16", 16, Some(DType::Bf16)),
    ("I32", 32, Some(DType::I32)),
    ("BOOL", 8, None),
    ("U8", 8, None),
    ("I8", 8, None),
    ("I16", 16, None),
    ("U16", 16, None),
    ("U32", 32, None),
    ("I64", 64, None),
    ("U64", 64, None),
    ("F64", 64, None),
    ("C64", 64, None),
    ("F8_E4M3", 8, None),
    ("F8_E5M2", 8, None),
    ("F8_E8M0", 8, None),
    ("F8_E4M3FNUZ", 8, None),
    ("F8_E5M2FNUZ", 8, None),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("F4", 4, None),
];

/// The tensors of the safetensors file `bytes` (the whole file), by name.
///
/// Format: <https://github.com/huggingface/safetensors#format>. Stricter than the format's own reader in one way: a key
/// that occurs twice anywhere in the header is an error. The error is a message without the file's name.
pub(crate) fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else {
        return Err(format!("truncated: expected at least {} bytes, got {}", LENGTH_BYTES + 2, bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    let after_length = &bytes[LENGTH_BYTES..];
    if length < 2 {
        return Err(format!("header too small: expected at least 2 bytes, got {length}"));
    }
    if length > MAX_HEADER_BYTES {
        return Err(format!("header too large: expected at most {MAX_HEADER_BYTES} bytes, got {length}"));
    }
    let header = usize::try_from(length)
        .ok()
        .and_then(|n| after_length.get(..n))
        .ok_or_else(|| format!("truncated: header of {length} bytes in a file of {} bytes", bytes.len()))?;
    let text = std::str::from_utf8(header).map_err(|e| format!("header is not UTF-8: {e}"))?;
    if !text.starts_with('{') {
        return Err("header: expected a JSON object".to_owned());
    }
    let raw: RawHeader = serde_json::from_str(text).map_err(|e| format!("header: {e}"))?;

    let data_start = LENGTH_BYTES + header.len();
    let data_bytes = bytes.len() - data_start;
    let mut entries = BTreeMap::new();
    let mut ranges = Vec::with_capacity(raw.tensors.len());
    for (name, info) in raw.tensors {
        let (begin, end, entry) =
            check(&info, data_start, data_bytes).map_err(|e| format!("tensor `{}`: {e}", shown(&name)))?;
        ranges.push((begin, end, name.clone()));
        entries.insert(name, entry);
    }
    check_contiguous(ranges, data_bytes)?;
    Ok(entries)
}

/// Checks type, shape and range of one tensor; returns the range within the data section too.
fn check(info: &RawInfo, data_start: usize, data_bytes: usize) -> Result<(usize, usize, Entry), String> {
    let (name, bits, dtype) = TYPES
        .iter()
        .find(|(name, ..)| *name == info.dtype)
        .ok_or_else(|| format!("unknown dtype `{}`", shown(&info.dtype)))?;
    let mut shape = Vec::with_capacity(info.shape.len());
    let mut total_bits = *bits;
    for &size in &info.shape {
        total_bits = total_bits.checked_mul(size).ok_or("shape overflows")?;
        shape.push(usize::try_from(size).map_err(|_| "shape overflows")?);
    }
    if !total_bits.is_multiple_of(8) {
        return Err(format!("expected whole bytes, got {total_bits} bits"));
    }
    let [begin, end] = info.offsets;
    let (Ok(begin_ix), Ok(end_ix)) = (usize::try_from(begin), usize::try_from(end)) else {
        return Err(format!("range {begin}..{end} overflows"));
    };
    if begin > end || end_ix > data_bytes {
        return Err(format!("range {begin}..{end} does not lie in the {data_bytes} bytes of data"));
    }
    if end - begin != total_bits / 8 {
        return Err(format!("expected {} bytes for {shape:?} of `{name}`, got {}", total_bits / 8, end - begin));
    }
    let entry = Entry { dtype: dtype.ok_or(*name), shape, begin: data_start + begin_ix, end: data_start + end_ix };
    Ok((begin_ix, end_ix, entry))
}

/// The ranges, sorted, must cover the data section exactly once.
fn check_contiguous(mut ranges: Vec<(usize, usize, String)>, data_bytes: usize) -> Result<(), String> {
    ranges.sort();
    let mut at = 0;
    for (begin, end, name) in ranges {
        let what = match begin.cmp(&at) {
            std::cmp::Ordering::Less => "overlaps the tensor before it",
            std::cmp::Ordering::Greater => "leaves a gap in front of it",
            std::cmp::Ordering::Equal => {
                at = end;
                continue;
            }
        };
        return Err(format!("tensor `{}` {what}: expected data at {at}, got {begin}", shown(&name)));
    }
    if at != data_bytes {
        return Err(format!("trailing bytes: expected {at} bytes of data, got {data_bytes}"));
    }
    Ok(())
}

/// The header as JSON, keys unique.
struct RawHeader {
    tensors: Vec<(String, RawInfo)>,
}

/// What the header says about one tensor.
struct RawInfo {
    dtype: String,
    shape: Vec<u64>,
    offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HeaderVisitor;
        impl<'de> Visitor<'de> for HeaderVisitor {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut tensors = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("duplicate key `{}`", shown(&key))));
                    }
                    if key == "__metadata__" {
                        map.next_value::<super::untrusted::UniqueMap<String>>()?;
                    } else {
                        tensors.push((key, map.next_value()?));
                    }
                }
                Ok(RawHeader { tensors })
            }
        }
        deserializer.deserialize_map(HeaderVisitor)
    }
}

// By hand, because a derived struct would also accept a JSON list.
impl<'de> Deserialize<'de> for RawInfo {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InfoVisitor;
        impl<'de> Visitor<'de> for InfoVisitor {
            type Value = RawInfo;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with `dtype`, `shape` and `data_offsets`")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawInfo, A::Error> {
                let (mut dtype, mut shape, mut offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    let repeated = match key.as_str() {
                        "dtype" => dtype.replace(map.next_value()?).is_some(),
                        "shape" => shape.replace(map.next_value()?).is_some(),
                        "data_offsets" => offsets.replace(map.next_value()?).is_some(),
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            return Err(A::Error::custom(format!("unknown key `{}`", shown(&key))));
                        }
                    };
                    if repeated {
                        return Err(A::Error::custom(format!("duplicate key `{key}`")));
                    }
                }
                Ok(RawInfo {
                    dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
                    offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
                })
            }
        }
        deserializer.deserialize_map(InfoVisitor)
    }
}
