//! torch.topk on the same data, through a Python that has torch.

use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

/// Reads fp32 from its input, answers the least seconds of torch.topk of the magnitudes, k = 1 %.
const SCRIPT: &str = "
import sys, time, torch
x = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32)
k, least = max(1, x.numel() // 100), float('inf')
for _ in range(4):
    start = time.perf_counter()
    torch.topk(x.abs(), k)
    least = min(least, time.perf_counter() - start)
print(least)
";

/// A Python with torch: the one that is named must have it, that of PATH may.
pub fn find(named: Option<&Path>) -> Result<Option<PathBuf>> {
    let python = named.unwrap_or(Path::new("python3"));
    let mut check = Command::new(python);
    check.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match (check.status(), named) {
        (Ok(status), _) if status.success() => Ok(Some(python.to_path_buf())),
        (_, None) => Ok(None),
        (Ok(_), Some(named)) => bail!("--python {}: it has no torch", named.display()),
        (Err(error), Some(named)) => Err(error).with_context(|| format!("--python {}", named.display())),
    }
}

/// None where it fails, with the reason on stderr: the compressors are what is measured.
pub fn topk_seconds(python: &Path, gradient: &[f32], stop: &AtomicBool) -> Option<f64> {
    if stop.load(Ordering::Relaxed) {
        return None;
    }
    eprintln!("torch.topk, n = {}", gradient.len());
    measure(python, gradient).map_err(|error| eprintln!("torch.topk: {error:#}; its column stays empty")).ok()
}

fn measure(python: &Path, gradient: &[f32]) -> Result<f64> {
    let mut child = Command::new(python).args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let bytes: Vec<u8> = gradient.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut input = child.stdin.take().context("no pipe to python")?;
    input.write_all(&bytes)?;
    drop(input);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("python ended with {}", output.status);
    }
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}
