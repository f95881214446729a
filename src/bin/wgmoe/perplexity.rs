//! `wgmoe perplexity`: how surprised a model is by a text, or by the answers of a file of tasks.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::{ArgGroup, Args};
use safetensors::{Dtype, SafeTensors};
use serde::Serialize;

use crate::files::{Files, ModelFiles};
use crate::requests::Prompt;
use crate::session::{Job, Session, bar, stem};
use crate::table::table;
use crate::values::file;
use crate::{Device, Format, logits, usage};

/// Tokens of one window of a long text (fewer where the model's context is shorter).
const WINDOW: usize = 2048;
/// Largest file of tokens or text.
const FILE_CAP: u64 = 1 << 30;

/// Measure perplexity: exp(sum of negative log-likelihoods / number of tokens)
#[derive(Args)]
#[command(group = ArgGroup::new("input").required(true), after_help = "\
With --text every token but the first counts. A text longer than a window
(2,048 tokens, or the model's context where that is shorter) is read in
windows that overlap by half, and each token counts once.

A --tokens file holds tasks: `<task>.ids` i32 [rows, width], padded at the end
with -1, and `<task>.answer_start` i32 [rows]. In each row the tokens from
answer_start on count; a task is pooled over all its rows. The answers are one
line a task, in the order of their names:
  {\"adapter\": \"shout\", \"task\": \"mirror\", \"tokens\": 1024, \"nll\": 2.5, \"perplexity\": 1.002}

Examples:
  wgmoe perplexity --model base --text novel.txt
  wgmoe perplexity --model base --lora shout=adapters/shout --adapter shout \\
      --tokens eval.safetensors --format json")]
pub struct Options {
    #[command(flatten)]
    files: ModelFiles,
    /// Adapter to measure [default: the base model]
    #[arg(long, value_name = "NAME")]
    adapter: Option<String>,
    /// A text file (UTF-8)
    #[arg(long, value_name = "FILE", group = "input")]
    text: Option<PathBuf>,
    /// A file of tokenised tasks
    #[arg(long, value_name = "FILE.safetensors", group = "input")]
    tokens: Option<PathBuf>,
    /// A table, or one JSON object a task
    #[arg(long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    device: Device,
}

pub fn run(options: &Options) -> anyhow::Result<()> {
    let Some(world) = options.files.join(&options.device)? else { return Ok(()) };
    options.files.check_adapter("--adapter", options.adapter.as_deref())?;
    let tier = options.device.tier();
    let files = options.files.open(&world)?;
    let tasks = match (&options.text, &options.tokens) {
        (Some(path), _) => vec![text_task(&files, path)?],
        (None, Some(path)) => {
            file("--tokens", path, "a safetensors file")?;
            read_tasks(&files, path).context("--tokens")?
        }
        (None, None) => return Err(usage("expected --text or --tokens")),
    };
    let pairs: Vec<_> = tasks.iter().map(|task| (options.adapter.as_deref(), task)).collect();
    let jobs = jobs(&pairs);
    let mut session = files.start(world, &options.device, tier, &jobs)?;
    let measured = measure(&mut session, &pairs, &jobs)?;
    let mut out = std::io::stdout().lock();
    match options.format {
        Format::Json => {
            for answer in &measured {
                writeln!(out, "{}", serde_json::to_string(answer)?)?;
            }
        }
        Format::Table => {
            let mut table = table(["adapter", "task", "tokens", "nll", "perplexity"]);
            for answer in &measured {
                table.add_row([
                    answer.adapter.unwrap_or("(base)").to_owned(),
                    answer.task.to_owned(),
                    answer.tokens.to_string(),
                    format!("{:.5}", answer.nll),
                    format!("{:.5}", answer.perplexity),
                ]);
            }
            writeln!(out, "{table}")?;
            eprintln!("{}", session.whereabouts());
        }
    }
    Ok(())
}

/// Rows whose tokens from a position on are counted together.
pub struct Task {
    pub name: String,
    rows: Vec<Row>,
}

/// A sequence, and the first position that counts (at least 1: the first token follows nothing).
struct Row {
    place: String,
    ids: Vec<u32>,
    from: usize,
}

/// The perplexity of one task under one adapter.
#[derive(Serialize)]
pub struct Measured<'a> {
    pub adapter: Option<&'a str>,
    pub task: &'a str,
    pub tokens: usize,
    /// Sum of the negative log-likelihoods, in nats.
    pub nll: f64,
    pub perplexity: f64,
}

/// One request for each row of each pair of adapter and task, in that order.
pub fn jobs(pairs: &[(Option<&str>, &Task)]) -> Vec<Job> {
    let rows = pairs.iter().flat_map(|(adapter, task)| task.rows.iter().map(move |row| (adapter, row)));
    rows.map(|(adapter, row)| Job::score(row.place.clone(), adapter.map(Into::into), row.ids.clone())).collect()
}

/// Runs `jobs` (made by [`jobs`] from the same pairs) in one batch and pools them.
pub fn measure<'a>(
    session: &mut Session,
    pairs: &[(Option<&'a str>, &'a Task)],
    jobs: &[Job],
) -> anyhow::Result<Vec<Measured<'a>>> {
    let owners: Vec<(usize, &Row)> =
        pairs.iter().enumerate().flat_map(|(pair, (_, task))| task.rows.iter().map(move |row| (pair, row))).collect();
    // Positions come in any order across rows; a sum a row keeps the result the same from run to run.
    let mut sums = vec![0.0; owners.len()];
    let bar = bar(jobs.iter().map(|job| job.ids.len()).sum(), "tokens");
    session.score(jobs, |job, position, logits| {
        bar.inc(1);
        let (_, row) = owners[job];
        if let Some(next) = row.ids.get(position + 1).filter(|_| position + 1 >= row.from) {
            sums[job] += logits::log_sum_exp(logits)? - f64::from(logits[*next as usize]);
        }
        Ok(())
    })?;
    bar.finish_and_clear();
    let pooled = |(pair, (adapter, task)): (usize, &(Option<&'a str>, &'a Task))| {
        let nll: f64 = owners.iter().zip(&sums).filter(|((owner, _), _)| *owner == pair).map(|(_, sum)| sum).sum();
        let tokens = task.rows.iter().map(|row| row.ids.len() - row.from).sum();
        Measured { adapter: *adapter, task: &task.name, tokens, nll, perplexity: (nll / tokens as f64).exp() }
    };
    Ok(pairs.iter().enumerate().map(pooled).collect())
}

/// A text as one task, in windows that overlap by half.
fn text_task(files: &Files, path: &Path) -> anyhow::Result<Task> {
    let place = format!("--text `{}`", path.display());
    file("--text", path, "a text file")?;
    let bytes = read_capped(path).with_context(|| place.clone())?;
    let text = String::from_utf8(bytes).map_err(|_| usage(format!("{place}: not valid UTF-8")))?;
    let ids = files.any_ids(&place, &Prompt::Text(text))?;
    if ids.len() < 2 {
        return Err(usage(format!("{place}: expected at least 2 tokens, got {}", ids.len())));
    }
    let window = files.config().max_positions.min(WINDOW);
    ensure!(window >= 2, "the model's context of {window} is too short to measure");
    let rows = windows(ids.len(), window)
        .map(|(begin, from, end)| Row { place: place.clone(), ids: ids[begin..end].to_vec(), from: from - begin })
        .collect();
    Ok(Task { name: stem(path), rows })
}

/// (begin, first position that counts, end) of each window over `n` tokens: together they count 1..n once.
fn windows(n: usize, window: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    let stride = window / 2;
    let mut counted = 1;
    std::iter::from_fn(move || {
        if counted >= n {
            return None;
        }
        let begin = if counted == 1 { 0 } else { counted + stride - window };
        let (from, end) = (counted, n.min(begin + window));
        counted = end;
        Some((begin, from, end))
    })
}

/// The tasks of a file of `<task>.ids` and `<task>.answer_start`, sorted by name and checked.
pub fn read_tasks(files: &Files, path: &Path) -> anyhow::Result<Vec<Task>> {
    let place = format!("`{}`", path.display());
    let bytes = read_capped(path).with_context(|| place.clone())?;
    let tensors = SafeTensors::deserialize(&bytes).with_context(|| format!("{place}: expected a safetensors file"))?;
    let mut names: Vec<_> = tensors.names().iter().filter_map(|name| name.strip_suffix(".ids")).collect();
    names.sort_unstable();
    ensure!(!names.is_empty(), "{place}: no tensor `<task>.ids`");
    names.into_iter().map(|name| task(files, &tensors, &place, name)).collect()
}

fn task(files: &Files, tensors: &SafeTensors, place: &str, name: &str) -> anyhow::Result<Task> {
    let (shape, ids) = integers(tensors, place, &format!("{name}.ids"))?;
    let (start_shape, starts) = integers(tensors, place, &format!("{name}.answer_start"))?;
    ensure!(shape.len() == 2, "{place}: tensor `{name}.ids`: expected [rows, width], got {shape:?}");
    let (n_rows, width) = (shape[0], shape[1]);
    ensure!(start_shape == [n_rows], "{place}: tensor `{name}.answer_start`: expected [{n_rows}], got {start_shape:?}");
    ensure!(n_rows > 0 && width > 0, "{place}: tensor `{name}.ids`: no rows");
    let mut rows = Vec::new();
    for (index, (padded, start)) in ids.chunks_exact(width).zip(starts).enumerate() {
        let place = format!("{place}: tensor `{name}.ids` row {index}");
        let used = padded.iter().position(|id| *id == -1).unwrap_or(width);
        ensure!(padded[used..].iter().all(|id| *id == -1), "{place}: a token after the padding");
        let ids = padded[..used]
            .iter()
            .map(|id| u32::try_from(*id).map_err(|_| anyhow::anyhow!("{place}: token id {id} is negative")))
            .collect::<Result<Vec<_>, _>>()?;
        files.check_ids(&place, &ids)?;
        let from = usize::try_from(start).ok().filter(|from| (1..used).contains(from));
        let from = from.with_context(|| format!("{place}: answer_start: expected 1 to {}, got {start}", used - 1))?;
        rows.push(Row { place, ids, from });
    }
    Ok(Task { name: name.to_owned(), rows })
}

/// Shape and values of an i32 tensor.
fn integers(tensors: &SafeTensors, place: &str, name: &str) -> anyhow::Result<(Vec<usize>, Vec<i32>)> {
    let tensor = tensors.tensor(name).ok().with_context(|| format!("{place}: tensor `{name}` is missing"))?;
    ensure!(tensor.dtype() == Dtype::I32, "{place}: tensor `{name}`: expected I32, got {:?}", tensor.dtype());
    let values = tensor.data().chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    Ok((tensor.shape().to_vec(), values))
}

fn read_capped(path: &Path) -> std::io::Result<Vec<u8>> {
    if std::fs::metadata(path)?.len() > FILE_CAP {
        return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "larger than 1 GiB"));
    }
    std::fs::read(path)
}

#[cfg(test)]
mod tests {
    use super::windows;

    #[test]
    fn windows_count_every_token_but_the_first_once_and_never_exceed_the_context() {
        for window in 2..12 {
            for n in 2..60 {
                let mut counted = Vec::new();
                for (begin, from, end) in windows(n, window) {
                    assert!(end - begin <= window && begin < from && from < end, "{window} {n}");
                    counted.extend(from..end);
                }
                assert_eq!(counted, (1..n).collect::<Vec<_>>(), "{window} {n}");
            }
        }
    }
}
