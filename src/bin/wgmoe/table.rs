//! Tables for people: one look for all commands.

use comfy_table::{ContentArrangement, Table, presets};

/// Below this width a wrapped table is harder to read than one that the terminal folds.
const NARROW: u16 = 60;

/// An empty table with `header`; it wraps to the width of a terminal and is as wide as it needs elsewhere.
pub fn table<T: ToString>(header: impl IntoIterator<Item = T>) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED);
    if table.width().is_some_and(|width| width >= NARROW) {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(header.into_iter().map(|cell| cell.to_string()).collect::<Vec<_>>());
    table
}

/// `text` with its control characters escaped, so that an answer can neither break the table nor steer the terminal.
pub fn cell(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// A number of bytes with a unit.
pub fn bytes(n: u64) -> String {
    indicatif::BinaryBytes(n).to_string()
}
