//! `flexcomm bench gpu`.

use super::data::{DType, Distribution};
use super::{gpu_check, gpu_torch, torch};
use anyhow::{Context, Result};
use flexcomm_compression::methods;
use flexcomm_gpu_kernels::bench::{self, Bench};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

/// Arguments of `flexcomm bench gpu`.
#[derive(clap::Args)]
#[command(after_help = "\
Columns:
  ms         median time on the device, by events: error feedback, selection or rounding, message, memory
  GB/s       least bytes that must move (gradient, memory before and after, message; gradient and memory twice where a
             norm of the whole tensor comes first) over that time
  of copy    that rate over the rate of a copy within the device in this run; 1 is as fast as memory allows
             (\"read\" only reads gradient and memory: over its share, that of the gains is their share of what reading allows)
  bytes out  one rank's message; indices and values of a selection as 8 bytes each
  gain       share of the gradient's energy that is sent
  decompress ms to add the message into a gradient
  to torch   time over that of torch operations that do the same on this GPU; - where there are none, or no torch

Before anything is timed, messages and memories are compared with the CPU's, byte for byte, and gains with exact ones.
powersgd's products are not: tests compare these.

The driver and NVRTC (pip install nvidia-cuda-nvrtc) are needed, and cuBLAS for PowerSGD; what is missing is named.")]
pub struct Args {
    /// Values of the gradient, several by commas.
    #[arg(long, value_delimiter = ',', default_value = "1e6,2.5e7,1e8", value_parser = super::compressors::read_n)]
    n: Vec<usize>,
    /// Values drawn from these, or recorded from a network's training and repeated up to n.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Distribution::Normal, Distribution::Laplace, Distribution::Recorded])]
    distributions: Vec<Distribution>,
    /// Number of the device.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// A Python with torch and CUDA [default: python3 of PATH, if it has them].
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// One JSON array of rows instead of the table.
    #[arg(long)]
    json: bool,
}

/// One line of the table; the names of `--json`, as far as they go those of `flexcomm bench compressors`.
#[derive(Debug, Clone, Serialize)]
struct Row {
    method: String,
    n: u64,
    dtype: &'static str,
    distribution: &'static str,
    /// 1e9 bytes that must move, per second.
    gb_per_s: f64,
    of_copy: f64,
    bytes_out: Option<u64>,
    gain: Option<f64>,
    ratio_to_torch: Option<f64>,
    compress_s: f64,
    decompress_s: Option<f64>,
}

impl Row {
    fn new(row: bench::Row, distribution: &'static str, torch: &BTreeMap<String, f64>) -> Self {
        Self {
            n: row.n,
            dtype: "fp32",
            distribution,
            gb_per_s: row.bytes as f64 / row.seconds * 1e-9,
            of_copy: row.of_copy,
            bytes_out: row.bytes_out,
            gain: row.gain,
            ratio_to_torch: torch.get(&row.method).map(|seconds| row.seconds / seconds),
            compress_s: row.seconds,
            decompress_s: row.decompress,
            method: row.method,
        }
    }
}

/// Runs `flexcomm bench gpu`.
pub fn run(args: &Args) -> Result<()> {
    let bench = Bench::new(args.device).context("failed to measure on a GPU (compressors take the CPU path here)")?;
    let python = gpu_torch::find(torch::find(args.python.as_deref())?);
    let blas = bench.blas().map_err(|why| eprintln!("powersgd is left out: failed to {why}")).ok();
    let device = bench.device()?;
    if !args.json {
        print!("{device}\n{}", head());
    }
    let mut rows = Vec::new();
    for distribution in &args.distributions {
        check(&bench, args, *distribution)?;
        for n in &args.n {
            let values = distribution.values(*n, DType::Fp32);
            let torch = python.as_deref().map(|python| gpu_torch::seconds(python, args.device, &values));
            let torch = torch.unwrap_or_default();
            let measured = bench.rows(&values, blas.as_ref())?;
            for row in measured.into_iter().map(|row| Row::new(row, distribution.name(), &torch)) {
                if !args.json {
                    print!("{}", line(&row));
                }
                rows.push(row);
            }
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        println!("no kernel, these take the CPU path: {}", without_kernel(&rows).join(", "));
    }
    Ok(())
}

/// Times of wrong results say nothing: first these are compared with the CPU's.
fn check(bench: &Bench, args: &Args, distribution: Distribution) -> Result<()> {
    let most = args.n.iter().copied().max().unwrap_or(0);
    for n in gpu_check::samples(most) {
        let methods = gpu_check::check(bench, &distribution.values(n, DType::Fp32))
            .context("failed to compare results: nothing is timed")?;
        if !args.json {
            println!("{} of {n} values: messages and memories of {methods} methods are the CPU's", distribution.name());
        }
    }
    Ok(())
}

/// Methods of `flexcomm bench compressors` that have no row here.
fn without_kernel(rows: &[Row]) -> Vec<&'static str> {
    // Under another name, a selection with other indices, or left out for want of cuBLAS: their kernels exist.
    const SAME: [&str; 6] = ["signum", "onebit", "lwtopk", "threshold", "sgc", "powersgd"];
    let named = |name: &str| rows.iter().any(|row| row.method.split('(').next() == Some(name));
    methods::all().map(|entry| entry.info.name).filter(|name| !named(name) && !SAME.contains(name)).collect()
}

fn head() -> String {
    format!(
        "{:32} {:>10} {:>9} {:>10} {:>9} {:>8} {:>11} {:>7} {:>10} {:>8}\n",
        "method", "n", "values", "ms", "GB/s", "of copy", "bytes out", "gain", "decompress", "to torch"
    )
}

fn line(row: &Row) -> String {
    let shown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let (bytes_out, gain) = (shown(row.bytes_out.map(|b| b.to_string())), shown(row.gain.map(|g| format!("{g:.4}"))));
    let decompress = shown(row.decompress_s.map(|s| format!("{:.4}", s * 1e3)));
    let torch = shown(row.ratio_to_torch.map(|ratio| format!("{ratio:.3}")));
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{:32} {:>10} {:>9} {:>10.4} {:>9.1} {:>8.3} {bytes_out:>11} {gain:>7} {decompress:>10} {torch:>8}",
        row.method,
        row.n,
        row.distribution,
        row.compress_s * 1e3,
        row.gb_per_s,
        row.of_copy
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(method: &str) -> bench::Row {
        bench::Row {
            method: method.into(),
            n: 100_000_000,
            seconds: 5e-4,
            bytes: 1_208_000_000,
            of_copy: 0.9,
            bytes_out: Some(8_000_000),
            gain: Some(0.25),
            decompress: None,
        }
    }

    #[test]
    fn rows_line_up_under_the_head() {
        let torch = BTreeMap::from([("topk(k=0.01)".to_owned(), 1e-2)]);
        let with = line(&Row::new(row("topk(k=0.01)"), "recorded", &torch));
        assert_eq!(
            with,
            "topk(k=0.01)                      100000000  recorded     0.5000    2416.0    0.900     8000000  0.2500          -    0.050\n"
        );
        assert_eq!(with.len(), head().len());
        let without = Row::new(row("natural"), "normal", &torch);
        assert_eq!(without.ratio_to_torch, None);
        assert!(serde_json::to_string(&without).unwrap().contains("\"ratio_to_torch\":null"));
    }

    /// Every method is either measured or named as one of the CPU's.
    #[test]
    fn methods_without_a_kernel_are_named() {
        let rows = [Row::new(row("topk(k=0.01)"), "normal", &BTreeMap::new())];
        let named = without_kernel(&rows);
        assert!(named.contains(&"sketchml") && named.contains(&"natural") && !named.contains(&"topk"), "{named:?}");
    }

    /// A table, or what is missing and what helps; never a panic.
    #[test]
    fn it_measures_or_says_why_not() {
        let (n, distributions) = (vec![10_000], vec![Distribution::Normal]);
        let args = Args { n, distributions, device: 0, python: None, json: false };
        if let Err(error) = run(&args) {
            let text = format!("{error:#}");
            assert!(text.starts_with("failed to measure on a GPU (compressors take the CPU path here): "), "{text}");
            assert!(text.contains("install") || text.contains("nvidia-smi"), "{text}");
            assert!(text.matches("libcuda").count() <= 1, "said twice: {text}");
        }
    }
}
