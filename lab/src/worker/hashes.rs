//! The log of parameter hashes: one line per step, compared between ranks by tests and by the lab.

use anyhow::{Context, Result};
use flexcomm_domain::Version;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes `step,version,hash` lines, or nothing.
pub struct HashLog {
    file: Option<(PathBuf, BufWriter<File>)>,
}

impl HashLog {
    /// To a new file at `path`.
    pub fn new(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { file: None }) };
        let file = File::create(path).with_context(|| format!("open the hash log {}", path.display()))?;
        let mut log = Self { file: Some((path.to_owned(), BufWriter::new(file))) };
        log.write("step,version,hash\n")?;
        Ok(log)
    }

    /// Whether hashes are wanted at all.
    pub fn wanted(&self) -> bool {
        self.file.is_some()
    }

    fn write(&mut self, line: &str) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        file.write_all(line.as_bytes()).with_context(|| format!("write to the hash log {}", path.display()))
    }

    /// After a step.
    pub fn step(&mut self, step: u64, version: Version, hash: u64) -> Result<()> {
        self.write(&format!("{step},{version},{hash:016x}\n"))
    }

    /// Hands all lines to the system.
    pub fn flush(&mut self) -> Result<()> {
        let Some((path, file)) = &mut self.file else { return Ok(()) };
        file.flush().with_context(|| format!("write to the hash log {}", path.display()))
    }
}
