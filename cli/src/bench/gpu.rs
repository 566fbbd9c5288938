//! `flexcomm bench gpu`.

use super::data::{DType, Distribution};
use anyhow::{Context, Result};
use flexcomm_gpu_kernels::bench::{Bench, Row};
use std::fmt::Write;

/// Arguments of `flexcomm bench gpu`.
#[derive(clap::Args)]
#[command(after_help = "\
Columns:
  ms      median time on the device, by events: error feedback, selection or rounding, message, memory
  GB/s    least bytes that must move (gradient, memory before and after, message) over that time
  of copy that rate over the rate of a copy within the device in this run; 1 is as fast as memory allows

The driver and NVRTC (pip install nvidia-cuda-nvrtc) are needed; what is missing is named.")]
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
}

/// Runs `flexcomm bench gpu`.
pub fn run(args: &Args) -> Result<()> {
    let bench = Bench::new(args.device).context("failed to measure on a GPU (compressors take the CPU path here)")?;
    print!("{}\n{}", bench.device()?, head());
    for distribution in &args.distributions {
        for n in &args.n {
            let rows = bench.rows(&distribution.values(*n, DType::Fp32))?;
            rows.iter().for_each(|row| print!("{}", line(row, distribution.name())));
        }
    }
    Ok(())
}

fn head() -> String {
    format!("{:20} {:>10} {:>9} {:>10} {:>9} {:>8}\n", "method", "n", "values", "ms", "GB/s", "of copy")
}

fn line(row: &Row, values: &str) -> String {
    let (ms, rate) = (row.seconds * 1e3, row.bytes as f64 / row.seconds * 1e-9);
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{:20} {:>10} {values:>9} {ms:>10.4} {rate:>9.1} {:>8.3}", row.method, row.n, row.of_copy);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_line_up_under_the_head() {
        let row =
            Row { method: "topk(k=0.01)".into(), n: 100_000_000, seconds: 5e-4, bytes: 1_208_000_000, of_copy: 0.9 };
        let line = line(&row, "recorded");
        assert_eq!(line, "topk(k=0.01)          100000000  recorded     0.5000    2416.0    0.900\n");
        assert_eq!(line.len(), head().len());
    }

    /// A table, or what is missing and what helps; never a panic.
    #[test]
    fn it_measures_or_says_why_not() {
        let args = Args { n: vec![10_000], distributions: vec![Distribution::Normal], device: 0 };
        if let Err(error) = run(&args) {
            let text = format!("{error:#}");
            assert!(text.starts_with("failed to measure on a GPU (compressors take the CPU path here): "), "{text}");
            assert!(text.contains("install") || text.contains("nvidia-smi"), "{text}");
            assert!(text.matches("libcuda").count() <= 1, "said twice: {text}");
        }
    }
}
