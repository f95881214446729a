//! Values of options: what each may be, and what is said of any other.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::Path;
use std::str::FromStr;

use anyhow::bail;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// A whole number of `range`.
pub fn number<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let n = text.parse().ok().filter(|n| range.contains(n));
        n.ok_or_else(|| format!("expected a whole number from {} to {}", range.start(), range.end()))
    }
}

/// One of several whole numbers of `range`, with commas between them.
pub fn numbers(range: RangeInclusive<usize>) -> impl Fn(&str) -> Result<usize, String> + Clone {
    let number = number(range);
    move |text| number(text).map_err(|expected| format!("{expected}, or several, as in 1,16,256"))
}

/// What logits are divided by.
pub fn temperature(text: &str) -> Result<f32, &'static str> {
    text.parse().ok().filter(|x: &f32| x.is_finite() && *x >= 0.0).ok_or("expected a number from 0 on, such as 0.7")
}

/// A probability that is not 0.
pub fn probability(text: &str) -> Result<f32, &'static str> {
    text.parse().ok().filter(|x| *x > 0.0 && *x <= 1.0).ok_or("expected a number above 0 and up to 1, such as 0.9")
}

/// A number of bytes, with or without a unit.
pub fn size(text: &str) -> Result<u64, &'static str> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return Err("expected bytes, or a number with KiB, MiB, GiB or TiB"),
    };
    let n: u64 = digits.trim().parse().map_err(|_| "expected a whole number, such as 128MiB")?;
    n.checked_mul(1 << shift).filter(|&n| n > 0).ok_or("expected 1 byte or more, and less than 16 EiB")
}

/// Makes sure that `option` names a folder with `file` in it.
pub fn folder(option: &str, path: &Path, file: &str) -> anyhow::Result<()> {
    let got = match path.metadata() {
        Ok(meta) if !meta.is_dir() => ", got a file".to_owned(),
        Ok(_) if !path.join(file).exists() => ", got one without it".to_owned(),
        Ok(_) => return Ok(()),
        Err(error) => unread(&error),
    };
    bail!("{option} `{}`: expected a folder with {file}{got}", path.display())
}

/// Makes sure that `option` names a file, which should be `what`; whatever can be read counts as one.
pub fn file(option: &str, path: &Path, what: &str) -> anyhow::Result<()> {
    let got = match path.metadata() {
        Ok(meta) if meta.is_dir() => ", got a folder".to_owned(),
        Ok(_) => return Ok(()),
        Err(error) => unread(&error),
    };
    bail!("{option} `{}`: expected {what}{got}", path.display())
}

/// What is said of a path that leads nowhere.
fn unread(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory => ", but there is nothing".to_owned(),
        _ => format!(": {error}"),
    }
}

/// A negative number behind an option is a value of it, if a wrong one, and no option of its own.
pub fn take_negative(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(take_negative)
}

/// `error` with what a word that nobody expects may have been meant to be; `command` is the first word of the command line.
pub fn explained(mut error: clap::Error, command: &str) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let tip = match (command, word.as_str()) {
        (option, _) if option.starts_with('-') => "options stand behind the command, as in `wgmoe devices --device 0`",
        (_, "--mpi") => "built with `cargo install --path . --features mpi`, the program has it",
        (_, option) if option.starts_with('-') => return error,
        ("run", _) => "a prompt stands behind --message or --prompt, in quotes where it has spaces",
        ("bench", _) => "numbers of a list have commas and no spaces between them, as in 1,16,256",
        _ => return error,
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_with_or_without_a_unit() {
        assert_eq!((size("7"), size("7B"), size("3 KiB"), size("1TiB")), (Ok(7), Ok(7), Ok(3 << 10), Ok(1 << 40)));
        for text in ["", "0", "-1", "1.5GiB", "1GB", "MiB", "16777216TiB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_whole_and_of_their_range() {
        let small = number(1..=512usize);
        assert_eq!((small("1"), small("512")), (Ok(1), Ok(512)));
        for text in ["", "0", "513", "-1", "1.0", "x", "99999999999999999999"] {
            assert_eq!(small(text), Err("expected a whole number from 1 to 512".to_owned()), "{text}");
        }
        assert!(numbers(0..=9)("x").unwrap_err().ends_with("from 0 to 9, or several, as in 1,16,256"));
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        assert_eq!((temperature("0"), temperature("1e-39").is_ok(), probability("1")), (Ok(0.0), true, Ok(1.0)));
        for text in ["", "x", "-1", "inf", "nan", "1e39"] {
            assert!(temperature(text).is_err() && probability(text).is_err(), "{text}");
        }
        assert!(probability("0").is_err() && probability("1.01").is_err());
    }
}
