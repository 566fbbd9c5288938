//! The same on the same GPU by torch's own operations, through a Python that has torch with CUDA.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Reads fp32 from its input; its argument is the device. Answers a line for each method: its name, a tab, the median of
/// seconds by CUDA events. Error feedback, what is sent, and the memory after: what the kernels' rows time. Signs are not
/// packed: torch has no operation for that.
const SCRIPT: &str = r#"
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
g = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32).to(device)
residual = 0.5 * g.flip(0)
n = g.numel()

def topk(share):
    k = min(max(1, int(n * share)), n)
    def run():
        compensated = g + residual
        indices = torch.topk(compensated.abs(), k, sorted=False).indices
        values = compensated[indices]
        compensated[indices] = 0.0
        return indices, values, compensated
    return run

def cast(dtype):
    def run():
        compensated = g + residual
        sent = compensated.to(dtype)
        return sent, compensated - sent.to(torch.float32)
    return run

def signs():
    compensated = g + residual
    sent = compensated.sign()
    return sent, compensated - sent

works = {f"topk(k={share:g})": topk(share) for share in (0.1, 0.01, 0.001)}
works |= {"fp16": cast(torch.float16), "bf16": cast(torch.bfloat16), "signsgd": signs}
for name, work in works.items():
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    print(name, sorted(times[3:])[4], sep="\t")
"#;

/// None, said on stderr, where this Python's torch sees no GPU.
pub fn find(python: Option<PathBuf>) -> Option<PathBuf> {
    let Some(python) = python else {
        eprintln!("torch: none found (--python FILE names a Python that has it); its column stays empty");
        return None;
    };
    let mut check = Command::new(&python);
    check.args(["-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]);
    let sees = check.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if sees.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    eprintln!("torch: that of {} sees no GPU; its column stays empty", python.display());
    None
}

/// By method; empty where it fails, with the reason on stderr: the kernels are what is measured.
pub fn seconds(python: &Path, device: u32, gradient: &[f32]) -> BTreeMap<String, f64> {
    let why = |error| eprintln!("torch: {error:#}; its column stays empty");
    measure(python, device, gradient).map_err(why).unwrap_or_default()
}

fn measure(python: &Path, device: u32, gradient: &[f32]) -> Result<BTreeMap<String, f64>> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT]).arg(device.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let bytes: Vec<u8> = gradient.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut input = child.stdin.take().context("no pipe to python")?;
    // A Python that ends early says why itself.
    let written = input.write_all(&bytes);
    drop(input);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("python ended with {}", output.status);
    }
    written?;
    read(&String::from_utf8(output.stdout)?)
}

fn read(text: &str) -> Result<BTreeMap<String, f64>> {
    let one = |line: &str| {
        let (name, seconds) = line.split_once('\t').with_context(|| format!("unexpected line {line:?}"))?;
        Ok((name.to_owned(), seconds.parse().with_context(|| format!("unexpected time {seconds:?}"))?))
    };
    text.lines().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_by_method() {
        let read = read("topk(k=0.01)\t0.002\nfp16\t1e-4\n").unwrap();
        assert_eq!(read, BTreeMap::from([("topk(k=0.01)".to_owned(), 0.002), ("fp16".to_owned(), 1e-4)]));
        assert!(super::read("nothing").is_err() && super::read("a\tb").is_err());
    }

    /// A Python that is none, and one that fails, leave the column empty.
    #[test]
    fn what_fails_leaves_the_column_empty() {
        assert!(seconds(Path::new("/nowhere/python3"), 0, &[1.0]).is_empty());
        assert!(seconds(Path::new("false"), 0, &[1.0; 100_000]).is_empty());
        assert_eq!(find(Some(PathBuf::from("false"))), None);
    }
}
