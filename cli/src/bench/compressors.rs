//! `flexcomm bench compressors`.

use super::data::{DType, Distribution};
use super::measure::{self, Case};
use super::{plot, table, torch};
use anyhow::{Context, Result, bail};
use flexcomm_compression::methods;
use flexcomm_compression::strategy::Strategy;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Arguments of `flexcomm bench compressors`.
#[derive(clap::Args)]
#[command(after_help = "\
Columns:
  GB/s in       bytes of the gradient over the time to compress it
  bytes out     one rank's message, of all exchanges together
  gain          share of the gradient's energy that is sent, ||C(x)||^2 / ||x||^2
  ratio to copy time to compress over the time of a plain copy of the same bytes, by as many threads, in this run
  decompress    time to decompress and add into a gradient, over the same copy
  ratio to torch  time to compress over that of torch.topk (k = 1 % of n) on the same data; - without torch

Times are the middle of at least 7 repetitions (as far as --patience allows) of a copy, compressing and decompressing in
turns. Threads each compress an equal part of the gradient. Parts are matrices, as near to squares as n allows.

Examples:
  flexcomm bench compressors                                     every method at 1e6 and 2.5e7 values
  flexcomm bench compressors --methods topk,onebit --n 1e6       two of them, quickly
  flexcomm bench compressors --methods 'topk(k=0.001)+ef(vanilla)' --distributions recorded
  flexcomm bench compressors --json --plot compressors.svg       for scripts and eyes")]
pub struct Args {
    /// Names, or whole strategies with parameters; a name alone takes its first example's parameters [default: every one].
    #[arg(long, value_name = "A,B", value_parser = split_methods)]
    methods: Option<Methods>,
    /// Values of the gradient, several by commas.
    #[arg(long, value_delimiter = ',', default_value = "1e6,2.5e7", value_parser = read_n)]
    n: Vec<usize>,
    /// Values drawn from these, or recorded from a network's training and repeated up to n.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Distribution::Normal, Distribution::Laplace, Distribution::Recorded])]
    distributions: Vec<Distribution>,
    /// Type of the gradient.
    #[arg(long, value_enum, default_value_t = DType::Fp32)]
    dtype: DType,
    /// Threads, for the copy as well.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Begin no further repetition of one method and size after this long.
    #[arg(long, default_value = "2s", value_name = "DURATION")]
    patience: flexcomm_domain::Seconds,
    /// Leave out methods at sizes that would take longer than this for one run (spectral methods grow with n^1.5 to n^2).
    #[arg(long, default_value = "60s", value_name = "DURATION")]
    limit: flexcomm_domain::Seconds,
    /// A Python with torch [default: python3 of PATH, if it has torch].
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// One JSON array of rows instead of the table.
    #[arg(long)]
    json: bool,
    /// Also draw ratios to copy, as SVG.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

/// Strategies' texts.
#[derive(Debug, Clone)]
struct Methods(Vec<String>);

/// Splits at commas outside brackets.
fn split_methods(text: &str) -> Result<Methods, String> {
    let (mut depth, mut parts) = (0i32, vec![String::new()]);
    for c in text.chars() {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        match (c, parts.last_mut()) {
            (',', _) if depth == 0 => parts.push(String::new()),
            (_, Some(last)) => last.push(c),
            _ => {}
        }
    }
    match parts.iter().any(String::is_empty) {
        true => Err("an empty name".into()),
        false => Ok(Methods(parts)),
    }
}

pub(super) fn read_n(text: &str) -> Result<usize, String> {
    let n: f64 = text.parse().map_err(|e| format!("{e}"))?;
    let whole = n.fract() == 0.0 && (1.0..=4e9).contains(&n);
    if whole { Ok(n as usize) } else { Err("allowed is a whole number of values from 1 to 4e9, as 1e6".into()) }
}

/// A name alone becomes its first example.
fn strategy(text: &str) -> Result<Strategy> {
    let entry = methods::all().find(|entry| entry.name == text);
    let whole = entry.map_or(text.to_owned(), |entry| format!("{}({})", entry.name, entry.examples[0]));
    whole.parse().with_context(|| format!("--methods {text}"))
}

fn strategies(args: &Args) -> Result<Vec<Strategy>> {
    match &args.methods {
        Some(Methods(texts)) => texts.iter().map(|text| strategy(text)).collect(),
        None => methods::all().map(|entry| strategy(entry.name)).collect(),
    }
}

/// Runs `flexcomm bench compressors`.
pub fn run(args: Args) -> Result<()> {
    let strategies = strategies(&args)?;
    let stop = stop_flag()?;
    let python = torch::find(args.python.as_deref())?;
    if python.is_none() {
        eprintln!("torch: none found (--python FILE names a Python that has it); its column stays empty");
    }
    let (mut rows, mut slow) = (Vec::new(), BTreeMap::new());
    let all = strategies.len() * args.n.len() * args.distributions.len();
    let mut done = 0;
    'all: for &n in &args.n {
        for &distribution in &args.distributions {
            let gradient = distribution.values(n, args.dtype);
            let torch = python.as_deref().and_then(|python| torch::topk_seconds(python, &gradient, &stop));
            let case = Case {
                gradient: &gradient,
                dtype: args.dtype,
                threads: usize::from(args.threads),
                patience: Duration::from_secs_f64(args.patience.get()),
            };
            for strategy in &strategies {
                done += 1;
                if stop.load(Ordering::Relaxed) {
                    break 'all;
                }
                let text = strategy.to_string();
                if let Some(&(before, seconds)) = slow.get(&text) {
                    let expected: f64 = seconds * (n as f64 / before as f64).powi(2);
                    if expected > args.limit.get() {
                        eprintln!(
                            "[{done}/{all}] {text}, n = {n}: left out, about {expected:.0} s for one run (--limit)"
                        );
                        continue;
                    }
                }
                eprintln!("[{done}/{all}] {text}, n = {n}, {}", distribution.name());
                let row = measure::row(strategy, &case, distribution, torch).with_context(|| text.clone())?;
                slow.insert(text, (n, row.compress_s));
                rows.push(row);
            }
        }
    }
    report(&args, &rows)?;
    if stop.load(Ordering::Relaxed) {
        eprintln!("ended before all was done: {} rows of {all}", rows.len());
    }
    Ok(())
}

fn report(args: &Args, rows: &[measure::Row]) -> Result<()> {
    match args.json {
        true => println!("{}", serde_json::to_string_pretty(rows)?),
        false => print!("{}", table::text(rows)),
    }
    if let Some(file) = &args.plot {
        if rows.is_empty() {
            bail!("--plot {}: nothing was measured", file.display());
        }
        std::fs::write(file, plot::svg(rows)).with_context(|| format!("--plot {}", file.display()))?;
        eprintln!("plot: {}", file.display());
    }
    Ok(())
}

/// Set by Ctrl-C: the method that runs is finished, and what there is is shown. A second one ends at once.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                set.store(true, Ordering::Relaxed);
                eprintln!("ending after this method; Ctrl-C again ends at once");
            }
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        });
    });
    Ok(flag)
}
