//! torch.topk on the same data, through a Python that has torch.

use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Reads fp32 from its input, answers the least seconds of torch.topk of the magnitudes, k = 1 %, on so many threads. The
/// magnitudes are made before the clock runs.
const SCRIPT: &str = "
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
x = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32).abs()
k, least = max(1, x.numel() // 100), float('inf')
for _ in range(4):
    start = time.perf_counter()
    torch.topk(x, k)
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

/// Seconds of torch.topk alone.
pub fn topk_seconds(python: &Path, gradient: &[f32], threads: usize) -> Result<f64> {
    let mut command = Command::new(python);
    command.args(["-c", SCRIPT, &threads.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
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
