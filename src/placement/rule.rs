//! The rule that shares experts out, before a rank or a number of experts is known; a table of owners comes from a file.

use std::path::Path;

use serde_json::Value;

use super::{Placement, Topology};
use crate::checkpoint::untrusted::{read_capped, shown};
use crate::error::{Error, ErrorKind, Result};

/// Largest table file, in bytes.
const MAX_TABLE_BYTES: u64 = 16 << 20;

/// How experts are shared out over the expert groups of a [`Topology`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PlacementRule {
    /// Contiguous blocks, the larger ones first.
    #[default]
    Linear,
    /// Expert e lives in group e mod `ep`.
    RoundRobin,
    /// The groups that own each expert, by expert.
    Table(Vec<Vec<usize>>),
}

impl PlacementRule {
    /// Reads a table file: a JSON list with one list of owners (expert groups, from 0) for each expert.
    ///
    /// Errors: `Io` when it cannot be read; `Format` when it is too large or no JSON; `Config` when it is no list of lists of
    /// numbers. Whether the numbers fit a model and a topology is checked by [`place`](Self::place).
    pub fn from_json(path: &Path) -> Result<Self> {
        let fail = |kind, message: String| Error::new(kind, format!("`{}`: {message}", path.display()));
        let bytes = read_capped(path, MAX_TABLE_BYTES)?;
        let value: Value = serde_json::from_slice(&bytes).map_err(|e| fail(ErrorKind::Format, e.to_string()))?;
        let wrong = |what: String, got: &Value| {
            let got = match got {
                Value::Array(_) => "a list".to_owned(),
                Value::Object(_) => "an object".to_owned(),
                other => shown(&other.to_string()),
            };
            fail(ErrorKind::Config, format!("{what}, got {got}"))
        };
        let list = value.as_array().ok_or_else(|| wrong("expected a list of owner lists".to_owned(), &value))?;
        let mut owners = Vec::with_capacity(list.len());
        for (expert, entry) in list.iter().enumerate() {
            let entry =
                entry.as_array().ok_or_else(|| wrong(format!("expert {expert}: expected a list of owners"), entry))?;
            let of_expert = entry.iter().map(|owner| {
                let number = owner.as_u64().and_then(|n| usize::try_from(n).ok());
                number.ok_or_else(|| wrong(format!("expert {expert}: expected the number of a group"), owner))
            });
            owners.push(of_expert.collect::<Result<Vec<_>>>()?);
        }
        Ok(Self::Table(owners))
    }

    /// Which of `experts` experts the rank at `topology` holds (whole, or a part of their width).
    ///
    /// Errors: as [`Placement::linear`] and [`Placement::table`], and `Config` when a table is for another number of experts.
    pub fn place(&self, experts: usize, topology: Topology) -> Result<Placement> {
        let (groups, group) = (topology.ep(), topology.ep_rank());
        match self {
            Self::Linear => Placement::linear(experts, groups, group),
            Self::RoundRobin => Placement::round_robin(experts, groups, group),
            Self::Table(owners) if owners.len() != experts => Err(Error::new(
                ErrorKind::Config,
                format!("placement table: expected owners of {experts} experts, got {}", owners.len()),
            )),
            Self::Table(owners) => Placement::table(owners, groups, group),
        }
    }
}

impl Placement {
    /// The placement of `experts` experts that the table file `path` gives the rank at `topology`.
    ///
    /// Errors: those of [`PlacementRule::from_json`] and [`PlacementRule::place`], with the file's name.
    pub fn from_json(path: &Path, experts: usize, topology: Topology) -> Result<Self> {
        let rule = PlacementRule::from_json(path)?;
        rule.place(experts, topology).map_err(|e| e.within(format!("`{}`", path.display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Placement> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table.json");
        std::fs::write(&path, text).unwrap();
        Placement::from_json(&path, 3, Topology::new(Some(4), Some(2), 2).unwrap())
    }

    #[test]
    fn a_table_file_gives_experts_several_owners() {
        assert_eq!(read("[[0], [1, 0], [1]]").unwrap().owned(), [1, 2]);
    }

    #[test]
    fn broken_table_files_say_where() {
        let cases = [
            ("", ErrorKind::Format, "EOF"),
            ("{}", ErrorKind::Config, "expected a list of owner lists, got an object"),
            ("[0, 1, 1]", ErrorKind::Config, "expert 0: expected a list of owners, got 0"),
            ("[[0], [-1], [1]]", ErrorKind::Config, "expert 1: expected the number of a group, got -1"),
            ("[[0], [1.5], [1]]", ErrorKind::Config, "got 1.5"),
            ("[[0], [1]]", ErrorKind::Config, "expected owners of 3 experts, got 2"),
            ("[[0], [], [1]]", ErrorKind::Config, "expert 1: expected at least one owner"),
            ("[[0], [2], [1]]", ErrorKind::Config, "expert 1: expected an owner below 2, got 2"),
            ("[[0], [1, 1], [1]]", ErrorKind::Config, "owner 1 is listed twice"),
        ];
        let mut failures = Vec::new();
        for (text, kind, part) in cases {
            match read(text) {
                Err(e) if e.kind() == kind && e.to_string().contains(part) && e.to_string().contains("table.json") => {}
                other => failures.push((text, other.map_err(|e| e.to_string()))),
            }
        }
        assert!(failures.is_empty(), "{failures:?}");
        let missing = PlacementRule::from_json(Path::new("/nonexistent/table.json"));
        assert_eq!(missing.unwrap_err().kind(), ErrorKind::Io);
    }
}
