//! NVRTC, by its C interface. Loaded when asked for and not before, and looked for where `pip` puts it, which no dynamic
//! linker does. `unsafe` is for the calls into it: signatures are those of `nvrtc.h`, unchanged since CUDA 11.

use super::library::{self, Place};
use crate::error::{LoadError, Version};
use crate::{Arch, Module, source};
use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};

type Program = *mut std::ffi::c_void;
type Status = c_int;

/// The compiler.
#[derive(Debug)]
pub struct Nvrtc {
    library: Library,
    path: String,
    version: Version,
    archs: Vec<u32>,
}

/// A module for one architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Text, for people and tests.
    pub ptx: String,
    /// An ELF file, which the driver loads as it is.
    pub cubin: Vec<u8>,
}

/// Where it may be.
const PLACE: Place = Place {
    variable: "FLEXCOMM_NVRTC",
    names: &["libnvrtc.so.13", "libnvrtc.so.12"],
    wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
};

impl Nvrtc {
    /// From `FLEXCOMM_NVRTC` (the library or its folder) and nowhere else where that is set; else from the Python
    /// environment in force, from CUDA's own folder, and wherever the dynamic linker looks (which finds the one that
    /// torch has loaded into this process).
    pub fn find() -> Result<Self, LoadError> {
        Self::first_of(&PLACE.candidates())
    }

    /// The first of these that exists; a name without a folder is left to the dynamic linker.
    pub fn first_of(candidates: &[PathBuf]) -> Result<Self, LoadError> {
        Self::chosen(candidates, |_| Ok(()))
    }

    /// As [`Nvrtc::find`], the first whose kernels load into this driver and that compiles for the device: one machine may
    /// have several, as torch's beside the toolkit's. An error is that of the first found.
    pub fn fitting(driver: Version, arch: Arch) -> Result<Self, LoadError> {
        Self::fitting_of(&PLACE.candidates(), driver, arch)
    }

    /// As [`Nvrtc::fitting`], of these.
    pub fn fitting_of(candidates: &[PathBuf], driver: Version, arch: Arch) -> Result<Self, LoadError> {
        Self::chosen(candidates, |nvrtc| {
            check_version(driver, nvrtc.version)?;
            arch.check(&nvrtc.archs).map(drop)
        })
    }

    fn chosen(candidates: &[PathBuf], fits: impl Fn(&Self) -> Result<(), LoadError>) -> Result<Self, LoadError> {
        let mut first = None;
        for found in library::each_of(candidates) {
            let bad = |(path, why): (&Path, String)| LoadError::BadNvrtc { path: path.display().to_string(), why };
            let nvrtc = found.map_err(bad).and_then(|(library, path)| Self::new(library, path));
            match nvrtc.and_then(|nvrtc| fits(&nvrtc).map(|()| nvrtc)) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(why) => first = first.or(Some(why)),
            }
        }
        Err(first.unwrap_or_else(|| LoadError::NoNvrtc { tried: library::listed(candidates) }))
    }

    fn new(library: Library, path: &Path) -> Result<Self, LoadError> {
        let path = path.display().to_string();
        let version = Version { major: 0, minor: 0 };
        let mut nvrtc = Self { library, path, version, archs: Vec::new() };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        nvrtc.call::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status>("nvrtcVersion", |f| unsafe {
            f(&mut major, &mut minor)
        })?;
        type Number = unsafe extern "C" fn(*mut c_int) -> Status;
        nvrtc.call::<Number>("nvrtcGetNumSupportedArchs", |f| unsafe { f(&mut count) })?;
        let mut archs = vec![0; usize::try_from(count).unwrap_or(0)];
        nvrtc.call::<Number>("nvrtcGetSupportedArchs", |f| unsafe { f(archs.as_mut_ptr()) })?;
        nvrtc.version = Version { major: major.unsigned_abs(), minor: minor.unsigned_abs() };
        nvrtc.archs = archs.iter().map(|arch| arch.unsigned_abs()).collect();
        Ok(nvrtc)
    }

    /// Of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Numbers of the architectures it compiles for.
    pub fn archs(&self) -> &[u32] {
        &self.archs
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A module for an architecture.
    pub fn compile(&self, module: &Module, arch: Arch) -> Result<Compiled, LoadError> {
        let arch = arch.check(&self.archs)?;
        let program = self.create(module)?;
        let compiled = self.compile_program(program, module, arch);
        let mut program = program;
        self.call::<unsafe extern "C" fn(*mut Program) -> Status>("nvrtcDestroyProgram", |f| unsafe {
            f(&mut program)
        })?;
        compiled
    }

    fn create(&self, module: &Module) -> Result<Program, LoadError> {
        let strings = |of: &[&str]| of.iter().map(|text| c_string(text)).collect::<Vec<_>>();
        let texts = strings(&source::HEADERS.iter().map(|(_, text)| *text).collect::<Vec<_>>());
        let names = strings(&source::HEADERS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        let (texts, names) = (pointers(&texts), pointers(&names));
        let (text, name, mut program) = (c_string(module.text), c_string(module.name), std::ptr::null_mut());
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> Status;
        let count = names.len() as c_int;
        self.call::<Create>("nvrtcCreateProgram", |f| unsafe {
            f(&mut program, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
        })?;
        Ok(program)
    }

    fn compile_program(&self, program: Program, module: &Module, arch: Arch) -> Result<Compiled, LoadError> {
        let mut options: Vec<CString> = source::OPTIONS.iter().map(|text| c_string(text)).collect();
        options.push(c_string(&format!("--gpu-architecture={}", arch.sm())));
        let options = pointers(&options);
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
        let compiled = self.call::<Compile>("nvrtcCompileProgram", |f| unsafe {
            f(program, options.len() as c_int, options.as_ptr())
        });
        if let Err(error) = compiled {
            let log = self.output(program, ("nvrtcGetProgramLogSize", "nvrtcGetProgramLog"))?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
            let log = if log.is_empty() { error.to_string() } else { log };
            return Err(LoadError::Compile { module: module.name, arch: arch.sm(), log });
        }
        let ptx = self.output(program, ("nvrtcGetPTXSize", "nvrtcGetPTX"))?;
        let cubin = self.output(program, ("nvrtcGetCUBINSize", "nvrtcGetCUBIN"))?;
        Ok(Compiled { ptx: String::from_utf8_lossy(&ptx).trim_end_matches('\0').to_owned(), cubin })
    }

    fn output(&self, program: Program, (size, get): (&'static str, &'static str)) -> Result<Vec<u8>, LoadError> {
        let mut bytes = 0usize;
        self.call::<unsafe extern "C" fn(Program, *mut usize) -> Status>(size, |f| unsafe { f(program, &mut bytes) })?;
        let mut out = vec![0u8; bytes];
        self.call::<unsafe extern "C" fn(Program, *mut c_char) -> Status>(get, |f| unsafe {
            f(program, out.as_mut_ptr().cast())
        })?;
        Ok(out)
    }

    /// Calls a function of the library that answers a status.
    fn call<F: Copy>(&self, name: &'static str, with: impl FnOnce(F) -> Status) -> Result<(), LoadError> {
        let bad = |why| LoadError::BadNvrtc { path: self.path.clone(), why };
        // SAFETY: every F above is the function's signature in nvrtc.h.
        let function =
            unsafe { self.library.get::<F>(name.as_bytes()) }.map_err(|error| bad(format!("{name}: {error}")))?;
        match with(*function) {
            0 => Ok(()),
            status => {
                Err(bad(format!("{name} says {}", library::status_name(&self.library, c"nvrtcGetErrorString", status))))
            }
        }
    }
}

/// Kernels for a driver must be of its major version, or older: within a major version cubins load into every driver.
fn check_version(driver: Version, nvrtc: Version) -> Result<(), LoadError> {
    if nvrtc.major > driver.major { Err(LoadError::DriverTooOld { driver, nvrtc }) } else { Ok(()) }
}

/// Where a Python environment would have it.
pub fn in_environment(root: &Path) -> Vec<PathBuf> {
    PLACE.in_environment(root)
}

/// Texts and names of ours hold no NUL.
fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_older_than_nvrtc_is_refused_with_both_versions() {
        let version = |major, minor| Version { major, minor };
        assert!(check_version(version(13, 0), version(13, 5)).is_ok(), "cubins load within a major version");
        assert!(check_version(version(14, 0), version(13, 5)).is_ok());
        let error = check_version(version(12, 4), version(13, 2)).unwrap_err().to_string();
        assert!(error.contains("12.4") && error.contains("13.2") && error.contains("too old"), "{error}");
    }
}
