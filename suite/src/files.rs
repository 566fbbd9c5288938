//! Files that are whole or not there, and digests of what they say.

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// Replaces a file; who reads it meanwhile, or after a crash, finds the old one or the new one.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let context = || format!("failed to write {}", path.display());
    let folder = path.parent().with_context(context)?;
    std::fs::create_dir_all(folder).with_context(|| format!("failed to make {}", folder.display()))?;
    let new = path.with_extension(format!("new-{}", std::process::id()));
    std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, path)).with_context(context)
}

/// The same, as JSON.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).with_context(|| format!("failed to write {} as JSON", path.display()))?;
    write(path, &(text + "\n"))
}

/// What a file of JSON holds.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("failed to read {}", path.display()))
}

/// The same, of a file that may be missing.
pub fn read_json_if_there<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    path.exists().then(|| read_json(path)).transpose()
}

/// The files of a folder whose names are wanted, in their order.
pub fn in_folder(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.retain(|path| wanted(&path.file_name().unwrap_or_default().to_string_lossy()));
    paths.sort();
    Ok(paths)
}

/// A digest of values, of 16 hexadecimal digits.
pub fn digest(value: &impl Serialize) -> Result<String> {
    let text = serde_json::to_vec(value).context("failed to write what a digest is of as JSON")?;
    Ok(digest_of_bytes(&text))
}

/// The same, of bytes.
pub fn digest_of_bytes(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_owned()
}
