//! Libraries of CUDA that are looked for where `pip` puts them, which no dynamic linker does.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};

/// Where a library may be.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Environment variable that names it, or its folder, and then nothing else counts.
    pub(super) variable: &'static str,
    /// Its names, newest first.
    pub(super) names: &'static [&'static str],
    /// Folders of NVIDIA's wheels below `site-packages`.
    pub(super) wheels: &'static [&'static str],
}

impl Place {
    /// What the variable says; else the Python environment in force, wherever the dynamic linker looks (which finds the
    /// one that torch has loaded into this process), and CUDA's own folder.
    pub(super) fn candidates(&self) -> Vec<PathBuf> {
        let named = std::env::var_os(self.variable).filter(|value| !value.is_empty()).map(PathBuf::from);
        let roots = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from);
        match named {
            Some(path) if path.is_dir() => self.within(&path),
            Some(path) => vec![path],
            None => roots.flat_map(|root| self.in_environment(&root)).chain(self.elsewhere()).collect(),
        }
    }

    fn within(&self, folder: &Path) -> Vec<PathBuf> {
        self.names.iter().map(|name| folder.join(name)).collect()
    }

    /// Where a Python environment has it.
    pub(super) fn in_environment(&self, root: &Path) -> Vec<PathBuf> {
        let pythons = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
        let pythons = pythons.filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
        let mut found: Vec<PathBuf> = pythons
            .flat_map(|python| self.wheels.iter().map(move |wheel| python.path().join("site-packages").join(wheel)))
            .flat_map(|folder| self.within(&folder))
            .filter(|path| path.exists())
            .collect();
        found.sort();
        found
    }

    fn elsewhere(&self) -> Vec<PathBuf> {
        let toolkit = std::env::var_os("CUDA_HOME").map_or_else(|| PathBuf::from("/usr/local/cuda"), PathBuf::from);
        self.names.iter().map(PathBuf::from).chain(self.within(&toolkit.join("lib64"))).collect()
    }
}

/// Those of these that exist, in order; a name without a folder is left to the dynamic linker. An error is of a file that
/// is there and does not load.
pub(super) fn each_of(candidates: &[PathBuf]) -> impl Iterator<Item = Result<(Library, &Path), (&Path, String)>> {
    let linked = |path: &Path| path.parent().is_none_or(|parent| parent.as_os_str().is_empty());
    candidates.iter().filter_map(move |path| {
        // SAFETY: loading a library of CUDA runs its initialisers, which only set up its own state.
        match unsafe { Library::new(path) } {
            Ok(library) => Some(Ok((library, path.as_path()))),
            Err(error) if !linked(path) && path.exists() => Some(Err((path.as_path(), error.to_string()))),
            Err(_) => None,
        }
    })
}

/// The first of these that exists.
pub(super) fn first_of(candidates: &[PathBuf]) -> Result<Option<(Library, &Path)>, (&Path, String)> {
    each_of(candidates).next().transpose()
}

/// A status in the library's own words, by its function `named`: one that takes the status and answers a string that is
/// never freed.
pub(super) fn status_name(library: &Library, named: &CStr, status: c_int) -> String {
    type Name = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: both functions that are asked for here (cuBLAS' and NVRTC's) have this signature in their headers.
    unsafe {
        match library.get::<Name>(named.to_bytes_with_nul()) {
            Ok(name) => CStr::from_ptr(name(status)).to_string_lossy().into_owned(),
            Err(_) => format!("status {status}"),
        }
    }
}

/// For people.
pub(super) fn listed(candidates: &[PathBuf]) -> String {
    candidates.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}
