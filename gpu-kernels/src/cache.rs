//! Compiled modules on disk: a training job of many processes compiles once.

use crate::CacheError;
use crate::error::Version;
use std::path::{Path, PathBuf};

/// A folder of cubins. A file's name is its key: module, digest of sources and options, architecture, NVRTC's version.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

/// In front of a cubin: its digest. What is torn or damaged is compiled again and never loaded.
const DIGEST: usize = 32;

impl Cache {
    /// In this folder, which need not exist.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// `FLEXCOMM_KERNEL_CACHE`, else `flexcomm/kernels` in the user's cache folder; none when there is no home either.
    pub fn from_environment() -> Option<Self> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let user = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        set("FLEXCOMM_KERNEL_CACHE").or_else(|| user().map(|folder| folder.join("flexcomm/kernels"))).map(Self::at)
    }

    /// Where a module lies.
    pub fn path(&self, module: &str, (digest, arch): (&str, &str), nvrtc: Version) -> PathBuf {
        let module = module.trim_end_matches(".cu");
        self.folder.join(format!("{module}-{digest}-{arch}-nvrtc{nvrtc}.cubin"))
    }

    /// What lies there, if it is whole.
    pub fn read(&self, path: &Path) -> Option<Vec<u8>> {
        let mut bytes = std::fs::read(path).ok()?;
        let (digest, cubin) = bytes.split_at_checked(DIGEST)?;
        if blake3::hash(cubin).as_bytes() != digest {
            return None;
        }
        bytes.drain(..DIGEST);
        Some(bytes)
    }

    /// Writes beside and renames: readers and other writers see whole files only.
    pub fn write(&self, path: &Path, cubin: &[u8]) -> Result<(), CacheError> {
        let error = |why| CacheError { path: path.to_owned(), why };
        std::fs::create_dir_all(&self.folder).map_err(error)?;
        let beside = path.with_extension(format!("{}.tmp", std::process::id()));
        let bytes = [blake3::hash(cubin).as_bytes(), cubin].concat();
        let written = std::fs::write(&beside, bytes).and_then(|()| std::fs::rename(&beside, path));
        written.inspect_err(|_| drop(std::fs::remove_file(&beside))).map_err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_comes_back_and_what_is_damaged_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("a/b"));
        let path = cache.path("select.cu", ("00ff", "sm_90"), Version { major: 13, minor: 2 });
        assert!(path.ends_with("select-00ff-sm_90-nvrtc13.2.cubin"));
        assert_eq!(cache.read(&path), None);
        cache.write(&path, b"cubin").unwrap();
        assert_eq!(cache.read(&path).as_deref(), Some(&b"cubin"[..]));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing is left beside it");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[DIGEST] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(cache.read(&path), None);
        std::fs::write(&path, &bytes[..DIGEST - 1]).unwrap();
        assert_eq!(cache.read(&path), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"").unwrap();
        let cache = Cache::at(&file);
        let error = cache.write(&file.join("x.cubin"), b"").unwrap_err().to_string();
        assert!(error.contains("keep compiled kernels in") && error.contains("x.cubin"), "{error}");
    }
}
