//! Reading JSON that strangers wrote: size caps, unique keys, numbers in plausible ranges, names safe to print.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};

/// Largest `config.json`, `generation_config.json` or `adapter_config.json`, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Longest part of a name from a file that a message repeats, in characters.
const MAX_SHOWN: usize = 160;

/// `name` as a message may show it: control characters escaped, long names cut.
pub(crate) fn shown(name: &str) -> String {
    let mut text: String = name.chars().take(MAX_SHOWN).flat_map(char::escape_debug).collect();
    if name.chars().nth(MAX_SHOWN).is_some() {
        text.push('…');
    }
    text
}

/// The whole of a regular file of at most `max_bytes`.
///
/// Errors: `Io` when it cannot be read or is no regular file, `Format` when it is larger.
pub(crate) fn read_capped(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let meta = std::fs::metadata(path).map_err(|e| Error::io(path, &e))?;
    if !meta.is_file() {
        return Err(Error::new(ErrorKind::Io, format!("`{}`: expected a regular file", path.display())));
    }
    if meta.len() > max_bytes {
        return Err(Error::new(
            ErrorKind::Format,
            format!("`{}`: expected at most {max_bytes} bytes, got {}", path.display(), meta.len()),
        ));
    }
    std::fs::read(path).map_err(|e| Error::io(path, &e))
}

/// A JSON object in the order of the file, refused when a key occurs twice.
#[derive(Debug, Clone)]
pub(crate) struct UniqueMap<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Unique<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Unique<V> {
            type Value = UniqueMap<V>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                let mut seen = std::collections::HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("duplicate key `{}`", shown(&key))));
                    }
                    entries.push((key, map.next_value()?));
                }
                Ok(UniqueMap(entries))
            }
        }
        deserializer.deserialize_map(Unique(PhantomData))
    }
}

/// A JSON object and the place it came from, with checked access.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Object {
    /// Reads the file `path`, which must hold one object.
    ///
    /// Errors: `Io` when it cannot be read, `Format` when it is too large or no JSON object.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Self::parse(path, &read_capped(path, MAX_CONFIG_BYTES)?)
    }

    /// The object in `bytes`, which came from `path`; errors as [`open`](Self::open).
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let map = serde_json::from_slice(bytes)
            .map_err(|e| Error::new(ErrorKind::Format, format!("`{}`: expected a JSON object: {e}", path.display())))?;
        Ok(Self { path: path.to_owned(), map })
    }

    /// The value of `key`; a null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// True when `key` is present, even as null.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// The object under `key`, if there is one.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Object>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Object { path: self.path.clone(), map: map.clone() })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// The entries, in the order of the file.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.map.iter()
    }

    /// An integer in `range`, or `None` when absent.
    pub(crate) fn count(&self, key: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        self.get(key).map(|v| self.as_count(key, v, range)).transpose()
    }

    /// An integer in `range`; absence is an error.
    pub(crate) fn need_count(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize> {
        self.count(key, range)?.ok_or_else(|| self.missing(key))
    }

    /// `value`, found under `key`, as an integer in `range`.
    pub(crate) fn as_count(&self, key: &str, value: &Value, range: RangeInclusive<usize>) -> Result<usize> {
        let found = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| range.contains(n));
        found.ok_or_else(|| self.wrong(key, &format!("an integer from {} to {}", range.start(), range.end()), value))
    }

    /// A finite number, or `None` when absent.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|v| self.as_number(key, v)).transpose()
    }

    /// `value`, found under `key`, as a finite number.
    pub(crate) fn as_number(&self, key: &str, value: &Value) -> Result<f64> {
        value.as_f64().filter(|n| n.is_finite()).ok_or_else(|| self.wrong(key, "a finite number", value))
    }

    /// A boolean; false when absent.
    pub(crate) fn flag(&self, key: &str) -> Result<bool> {
        match self.get(key) {
            None => Ok(false),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(key, "true or false", v)),
        }
    }

    /// A string, or `None` when absent.
    pub(crate) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string", v)),
        }
    }

    /// A list of strings; empty when absent.
    pub(crate) fn strings(&self, key: &str) -> Result<Vec<String>> {
        let Some(value) = self.get(key) else {
            return Ok(Vec::new());
        };
        let list = value.as_array().and_then(|a| a.iter().map(|v| v.as_str().map(str::to_owned)).collect());
        list.ok_or_else(|| self.wrong(key, "a list of strings", value))
    }

    /// True when `key` is set to something: not null, false, an empty string, list or object.
    pub(crate) fn is_set(&self, key: &str) -> bool {
        match self.get(key) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::String(s)) => !s.is_empty(),
            Some(Value::Array(a)) => !a.is_empty(),
            Some(Value::Object(o)) => !o.is_empty(),
            Some(_) => true,
        }
    }

    /// A `Config` error: `key` is absent.
    pub(crate) fn missing(&self, key: &str) -> Error {
        self.error(ErrorKind::Config, format!("`{key}` is missing"))
    }

    /// A `Config` error: `key` holds `got` where `expected` is wanted.
    pub(crate) fn wrong(&self, key: &str, expected: &str, got: &Value) -> Error {
        let got = match got {
            Value::Array(_) => "a list".to_owned(),
            Value::Object(_) => "an object".to_owned(),
            other => shown(&other.to_string()),
        };
        self.error(ErrorKind::Config, format!("`{}`: expected {expected}, got {got}", shown(key)))
    }

    /// An `Unsupported` error about `what`.
    pub(crate) fn unsupported(&self, what: impl fmt::Display) -> Error {
        self.error(ErrorKind::Unsupported, format!("{what}"))
    }

    /// An error of `kind` that names the file.
    pub(crate) fn error(&self, kind: ErrorKind, message: String) -> Error {
        Error::new(kind, format!("`{}`: {message}", self.path.display()))
    }
}
