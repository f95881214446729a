//! What is decided by measuring: thresholds between two ways to do the same work, one entry a tier, and how products on matrices are
//! cut. It is data, which `wgmoe bench tune` measures on a device.
//!
//! Every table gives the same results, within the tier's tolerance.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Tier;
use crate::plan::matrix::CutTable;

/// The table of the crate, from searches on an H200 (see `docs/EXPERIMENTS.md`).
const BUILT_IN: &str = include_str!("tuning.json");

/// What one tier decides by.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// Pairs of a matrix, on average, from which on pairs are sorted into tiles: of experts, and of experts and adapters.
    pub tiles_from: f64,
    /// Pairs of a matrix, on average, from which on these tiles are 8 high instead of 4; at least `tiles_from`. Tiles on
    /// cooperative matrices have heights of their own.
    pub tiles_of_8_from: f64,
    /// Pairs of a step that are few at most.
    pub few_pairs: usize,
    /// Pairs of an expert, on average, that are few at most.
    pub few_pairs_per_expert: f64,
    /// Pairs of an expert, on average, up to which few pairs are taken one by one instead of in tiles.
    pub single_pairs_per_expert: f64,
    /// Pairs of an expert and adapter, on average, up to which they are shrunk apart instead of in runs.
    pub apart_pairs: f64,
    /// Tokens of a step up to which they are shrunk apart instead of in runs.
    pub apart_tokens: usize,
    /// Columns of a product of few rows from which on a subgroup takes two of them.
    pub two_columns_from: usize,
    /// Columns of a product of few rows from which on a subgroup takes four of them; at least `two_columns_from`.
    pub four_columns_from: usize,
    /// Workgroups of a dense product of rows one by one up to which it takes them so.
    pub dense_single_workgroups: usize,
    /// Workgroups of a dense product in tiles of 8 rows from which on it has these instead of tiles of 4.
    pub dense_tile_workgroups: usize,
    /// Workgroups of a dense product on cooperative matrices that a tile must leave for it to be taken: the highest of those is.
    pub matrix_workgroups: usize,
    /// Rows from which on a product that must be as exact as f32 arithmetic runs on cooperative matrices, which then multiply
    /// twice.
    pub exact_matrix_rows: usize,
}

/// One field of a [`Tuning`], as a number.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Only whole numbers, from 1; else from 0.1.
    pub whole: bool,
    /// Reads it.
    pub get: fn(&Tuning) -> f64,
    set: fn(&mut Tuning, f64),
}

/// A field that is an average.
const fn ratio(name: &'static str, get: fn(&Tuning) -> f64, set: fn(&mut Tuning, f64)) -> Field {
    Field { name, whole: false, get, set }
}

/// A field that is a count.
const fn count(name: &'static str, get: fn(&Tuning) -> f64, set: fn(&mut Tuning, f64)) -> Field {
    Field { name, whole: true, get, set }
}

/// Every field in order.
pub const FIELDS: [Field; 13] = [
    ratio("tiles_from", |t| t.tiles_from, |t, v| t.tiles_from = v),
    ratio("tiles_of_8_from", |t| t.tiles_of_8_from, |t, v| t.tiles_of_8_from = v),
    count("few_pairs", |t| t.few_pairs as f64, |t, v| t.few_pairs = v as usize),
    ratio("few_pairs_per_expert", |t| t.few_pairs_per_expert, |t, v| t.few_pairs_per_expert = v),
    ratio("single_pairs_per_expert", |t| t.single_pairs_per_expert, |t, v| t.single_pairs_per_expert = v),
    ratio("apart_pairs", |t| t.apart_pairs, |t, v| t.apart_pairs = v),
    count("apart_tokens", |t| t.apart_tokens as f64, |t, v| t.apart_tokens = v as usize),
    count("two_columns_from", |t| t.two_columns_from as f64, |t, v| t.two_columns_from = v as usize),
    count("four_columns_from", |t| t.four_columns_from as f64, |t, v| t.four_columns_from = v as usize),
    count(
        "dense_single_workgroups",
        |t| t.dense_single_workgroups as f64,
        |t, v| t.dense_single_workgroups = v as usize,
    ),
    count("dense_tile_workgroups", |t| t.dense_tile_workgroups as f64, |t, v| t.dense_tile_workgroups = v as usize),
    count("matrix_workgroups", |t| t.matrix_workgroups as f64, |t, v| t.matrix_workgroups = v as usize),
    count("exact_matrix_rows", |t| t.exact_matrix_rows as f64, |t, v| t.exact_matrix_rows = v as usize),
];

/// The largest value of every field. Where a field holds, pairs, tokens or columns are workgroups of one dimension of a
/// dispatch, of which every device allows so many.
const MOST: f64 = 65_535.0;

impl Field {
    /// `tuning` with `value` in this field; `None` where it is out of range, or out of order with another field.
    pub fn with(&self, tuning: &Tuning, value: f64) -> Option<Tuning> {
        let mut changed = *tuning;
        (self.set)(&mut changed, value);
        (self.takes(value) && changed.in_order().is_ok()).then_some(changed)
    }

    fn takes(&self, value: f64) -> bool {
        let least = if self.whole { 1.0 } else { 0.1 };
        (least..=MOST).contains(&value) && (!self.whole || value.fract() == 0.0)
    }

    fn expected(&self) -> &'static str {
        if self.whole { "expected a whole number from 1 to 65535" } else { "expected a number from 0.1 to 65535" }
    }
}

impl Tuning {
    /// Fields that must not exceed another one; else the names of both.
    fn in_order(&self) -> Result<(), [&'static str; 2]> {
        if self.tiles_of_8_from < self.tiles_from {
            return Err(["tiles_of_8_from", "tiles_from"]);
        }
        if self.four_columns_from < self.two_columns_from {
            return Err(["four_columns_from", "two_columns_from"]);
        }
        Ok(())
    }
}

/// The [`Tuning`] of every tier, and the cuts of products on matrices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TuningTable {
    /// That of [`Tier::Baseline`].
    pub baseline: Tuning,
    /// That of [`Tier::Subgroup`].
    pub subgroup: Tuning,
    /// That of [`Tier::Matrix`].
    pub matrix: Tuning,
    /// How products on matrices are cut.
    pub cuts: CutTable,
}

/// A table as it stands in a file: one that was written before cuts were data has none.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    baseline: Tuning,
    subgroup: Tuning,
    matrix: Tuning,
    cuts: Option<CutTable>,
}

impl TuningTable {
    /// The table of this crate.
    ///
    /// # Errors
    /// As [`TuningTable::read`]; the tests see to it that there are none.
    pub fn built_in() -> Result<Self> {
        Self::parse(BUILT_IN).map_err(|e| e.within("`tuning.json` of the crate"))
    }

    /// Reads a table: JSON, for each tier an object with all fields of [`Tuning`], and a [`CutTable`], without which the crate's cuts
    /// stay.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] when the file cannot be read, [`ErrorKind::Format`] when it is not JSON, [`ErrorKind::Config`] for a
    /// field that is missing, unknown or out of range, and for a cut that no shader can be made of.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, &e))?;
        Self::parse(&text).map_err(|e| e.within(format!("`{}`", path.display())))
    }

    fn parse(text: &str) -> Result<Self> {
        let config = |message: String| Error::new(ErrorKind::Config, message);
        let value: Value = serde_json::from_str(text).map_err(|e| Error::new(ErrorKind::Format, e.to_string()))?;
        let object =
            value.as_object().ok_or_else(|| config("expected an object with an entry for each tier".into()))?;
        for (tier, entry) in object.iter().filter(|(name, _)| *name != "cuts") {
            let entry = entry.as_object().ok_or_else(|| config(format!("`{tier}`: expected an object")))?;
            for field in FIELDS {
                let Some(got) = entry.get(field.name) else { continue };
                // 2.0 is a whole number, but none that serde would take for one.
                let whole = !field.whole || got.is_u64();
                if !whole || !got.as_f64().is_some_and(|v| field.takes(v)) {
                    return Err(config(format!("`{tier}.{}`: {}, got {got}", field.name, field.expected())));
                }
            }
        }
        // What is missing, unknown or given twice.
        let Written { baseline, subgroup, matrix, cuts } =
            serde_json::from_str(text).map_err(|e| config(e.to_string()))?;
        let cuts = cuts.map_or_else(|| Self::built_in().map(|table| table.cuts), Ok)?;
        let table = Self { baseline, subgroup, matrix, cuts };
        for tier in [Tier::Baseline, Tier::Subgroup, Tier::Matrix] {
            if let Err([large, small]) = table.of(tier).in_order() {
                return Err(config(format!("`{tier}.{large}`: expected no less than `{small}`")));
            }
        }
        table.cuts.check().map_err(|e| config(format!("`cuts`: {e}")))?;
        Ok(table)
    }

    /// The entry of a tier.
    pub fn of(&self, tier: Tier) -> Tuning {
        match tier {
            Tier::Baseline => self.baseline,
            Tier::Subgroup => self.subgroup,
            Tier::Matrix => self.matrix,
        }
    }

    /// The same table with another entry for a tier.
    #[must_use]
    pub fn with(self, tier: Tier, tuning: Tuning) -> Self {
        match tier {
            Tier::Baseline => Self { baseline: tuning, ..self },
            Tier::Subgroup => Self { subgroup: tuning, ..self },
            Tier::Matrix => Self { matrix: tuning, ..self },
        }
    }

    /// The table as a file that [`TuningTable::read`] takes.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] for values that JSON has no word for.
    pub fn json(&self) -> Result<String> {
        let text = serde_json::to_string_pretty(self).map_err(|e| Error::new(ErrorKind::Format, e.to_string()))?;
        Ok(rows_of_lists(&text))
    }
}

/// Pretty JSON whose lists have an object a line, like the rows of a table.
fn rows_of_lists(text: &str) -> String {
    let (mut out, mut in_row) = (String::new(), false);
    for line in text.lines() {
        let bare = line.trim_start();
        // Of objects, only those in lists begin with a line of their own, but for the outermost.
        let begins = bare == "{" && bare != line;
        let ends = in_row && bare.starts_with('}');
        if in_row {
            out.push(' ');
        }
        out += if in_row { bare } else { line };
        in_row = (in_row || begins) && !ends;
        if !in_row {
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_table_is_read_and_written_alike() {
        let table = TuningTable::built_in().unwrap();
        assert_eq!(table.json().unwrap(), BUILT_IN);
        let entry = serde_json::to_value(table.subgroup).unwrap();
        let names: Vec<&str> = entry.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, FIELDS.map(|field| field.name), "every field is in the list");
        for field in FIELDS {
            let value = (field.get)(&table.subgroup) + 1.0;
            let changed = field.with(&table.subgroup, value).unwrap();
            assert_eq!((field.get)(&changed), value, "{}", field.name);
            assert_eq!(field.with(&changed, value - 1.0), Some(table.subgroup), "{} alone", field.name);
            assert_eq!([0.0, 65_536.0, f64::NAN].map(|v| field.with(&changed, v)), [None; 3], "{}", field.name);
        }
        let other = Tuning { few_pairs: 7, ..table.matrix };
        for tier in [Tier::Baseline, Tier::Subgroup, Tier::Matrix] {
            let changed = table.clone().with(tier, other);
            assert_eq!(changed.of(tier), other);
            assert_eq!(changed.with(tier, table.of(tier)), table, "other tiers stay");
        }
    }

    #[test]
    fn a_bad_table_is_refused_by_the_name_of_its_field() {
        let with = |tier: &str, field: &str, value: Value| {
            let mut table: Value = serde_json::from_str(BUILT_IN).unwrap();
            table[tier][field] = value;
            table.to_string()
        };
        let without = |tier: &str, field: &str| {
            let mut table: Value = serde_json::from_str(BUILT_IN).unwrap();
            table[tier].as_object_mut().unwrap().remove(field);
            table.to_string()
        };
        let cut = |edge: &str, list: &str, i: usize, field: &str, value: Value| {
            let mut table: Value = serde_json::from_str(BUILT_IN).unwrap();
            table["cuts"][edge][list][i][field] = value;
            table.to_string()
        };
        let mut old: Value = serde_json::from_str(BUILT_IN).unwrap();
        old.as_object_mut().unwrap().remove("cuts");
        assert_eq!(TuningTable::parse(&old.to_string()).unwrap(), TuningTable::built_in().unwrap(), "the crate's cuts");
        let doubled = BUILT_IN.replacen("\"few_pairs\"", "\"few_pairs\": 3, \"few_pairs\"", 1);
        for (text, kind, words) in [
            ("{".to_owned(), ErrorKind::Format, "line 1"),
            ("[]".to_owned(), ErrorKind::Config, "an entry for each tier"),
            ("{}".to_owned(), ErrorKind::Config, "missing field `baseline`"),
            ("{\"matrix\": 3}".to_owned(), ErrorKind::Config, "`matrix`: expected an object"),
            (with("other", "few_pairs", 1.into()), ErrorKind::Config, "unknown field `other`"),
            (with("matrix", "many_pairs", 1.into()), ErrorKind::Config, "unknown field `many_pairs`"),
            (without("matrix", "few_pairs"), ErrorKind::Config, "missing field `few_pairs`"),
            (doubled, ErrorKind::Config, "duplicate field `few_pairs`"),
            (
                with("matrix", "few_pairs", 0.into()),
                ErrorKind::Config,
                "`matrix.few_pairs`: expected a whole number from 1 to 65535, got 0",
            ),
            (with("matrix", "few_pairs", 65_536.into()), ErrorKind::Config, "got 65536"),
            (with("matrix", "few_pairs", 3.5.into()), ErrorKind::Config, "got 3.5"),
            (with("matrix", "few_pairs", 3.0.into()), ErrorKind::Config, "got 3.0"),
            (with("matrix", "few_pairs", "3".into()), ErrorKind::Config, "got \"3\""),
            (
                with("subgroup", "tiles_from", 0.into()),
                ErrorKind::Config,
                "`subgroup.tiles_from`: expected a number from 0.1 to 65535, got 0",
            ),
            (with("subgroup", "tiles_from", Value::Null), ErrorKind::Config, "got null"),
            (
                with("subgroup", "tiles_from", 13.into()),
                ErrorKind::Config,
                "`subgroup.tiles_of_8_from`: expected no less than `tiles_from`",
            ),
            (
                with("baseline", "four_columns_from", 1.into()),
                ErrorKind::Config,
                "`baseline.four_columns_from`: expected no less than `two_columns_from`",
            ),
            (
                cut("16", "experts", 2, "columns", 40.into()),
                ErrorKind::Config,
                "`cuts`: `16`: `experts[2]`: `columns`: expected a multiple of 16 up to 512, got 40",
            ),
            (
                cut("8", "dense", 3, "direct", false.into()),
                ErrorKind::Config,
                "`cuts`: `8`: `dense[3]`: `x_ahead`: expected a divisor of 1, got 4",
            ),
            (cut("16", "dense", 0, "width", 1.into()), ErrorKind::Config, "unknown field `width`"),
            (cut("16", "dense", 0, "height", (-16).into()), ErrorKind::Config, "invalid value: integer `-16`"),
        ] {
            let error = TuningTable::parse(&text).unwrap_err();
            assert!(error.kind() == kind && error.to_string().contains(words), "{words}: {:?} {error}", error.kind());
        }
        let error = TuningTable::read(Path::new("no/such.json")).unwrap_err();
        assert!(error.kind() == ErrorKind::Io && error.to_string().contains("no/such.json"), "{error}");
    }
}
