//! What user-mode Linux needs on this machine; included by the test crates that start it.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds what is preloaded into user-mode Linux (`lab/uml/preload.c` says why) in a folder.
pub fn preload(folder: &Path) -> PathBuf {
    let library = folder.join("preload.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/uml/preload.c");
    let built = Command::new("cc").args(["-O2", "-shared", "-fPIC", source, "-ldl", "-o"]).arg(&library).status();
    assert!(built.is_ok_and(|status| status.success()), "cc failed on {source}");
    library
}
