//! Why kernels cannot be had, each with its remedy. The caller's answer to any of these is the CPU path and one log line.

use std::path::PathBuf;

/// Failed to load the kernels on a device.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is no `libcuda.so`.
    #[error(
        "load the CUDA driver: there is no libcuda.so.1 here; install NVIDIA's driver, or, in a container, start it with \
         the GPU passed in"
    )]
    NoDriver,
    /// The driver answers with an error.
    #[error("{call}: the CUDA driver says {code}; `nvidia-smi` shows whether it runs and sees the device")]
    Driver {
        /// What was asked of it.
        call: &'static str,
        /// Its error's name.
        code: String,
    },
    /// Kernels of this NVRTC do not load into this driver.
    #[error(
        "load kernels of NVRTC {nvrtc} into a driver for CUDA {driver}: it is too old; install a driver for CUDA {nvrtc} or \
         newer, or NVRTC of CUDA {driver}'s major version (FLEXCOMM_NVRTC names its library)"
    )]
    DriverTooOld {
        /// CUDA version of the driver, as "12.4".
        driver: Version,
        /// Version of NVRTC.
        nvrtc: Version,
    },
    /// No such device.
    #[error("open CUDA device {ordinal}: there are {count}; CUDA_VISIBLE_DEVICES may hide some")]
    NoDevice {
        /// Asked for.
        ordinal: u32,
        /// How many the driver shows.
        count: u32,
    },
    /// An architecture before the first that the kernels are written for, or one that this NVRTC does not know.
    #[error("compile for {arch}: {why}")]
    Arch {
        /// As `sm_70`.
        arch: String,
        /// With the remedy.
        why: String,
    },
    /// NVRTC was not found.
    #[error(
        "find NVRTC (looked at {tried}): `pip install nvidia-cuda-nvrtc` into the environment that runs this, or set \
         FLEXCOMM_NVRTC to libnvrtc.so or its folder"
    )]
    NoNvrtc {
        /// Where it was looked for.
        tried: String,
    },
    /// NVRTC was found but is no library that can be used.
    #[error("use {path} as NVRTC: {why}; install another build of nvidia-cuda-nvrtc, or point FLEXCOMM_NVRTC to one")]
    BadNvrtc {
        /// The library.
        path: String,
        /// What failed.
        why: String,
    },
    /// cuBLAS was not found.
    #[error(
        "find cuBLAS (looked at {tried}), which PowerSGD needs: `pip install nvidia-cublas` into the environment that runs \
         this, or set FLEXCOMM_CUBLAS to libcublas.so or its folder; PowerSGD takes the CPU path until then"
    )]
    NoBlas {
        /// Where it was looked for.
        tried: String,
    },
    /// cuBLAS was found but is no library that can be used.
    #[error("use {path} as cuBLAS: {why}; install another build of nvidia-cublas, or point FLEXCOMM_CUBLAS to one")]
    BadBlas {
        /// The library.
        path: String,
        /// What failed.
        why: String,
    },
    /// The sources do not compile: a fault of this program.
    #[error("compile {module} for {arch}: {log}")]
    Compile {
        /// Which file.
        module: &'static str,
        /// For which architecture.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// A kernel that its module does not have: a fault of this program.
    #[error("find kernel {kernel} in {module}: {code}")]
    NoKernel {
        /// Its name.
        kernel: &'static str,
        /// Where it should be.
        module: &'static str,
        /// The driver's error.
        code: String,
    },
}

/// A version of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Kernels of a newer major version do not load into an older driver.
    pub major: u32,
    /// Within a major version, cubins load into every driver.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Failed to keep a compiled module. Nobody needs to stop for it: it is compiled again next time.
#[derive(Debug, thiserror::Error)]
#[error("keep compiled kernels in {path}: {why}")]
pub struct CacheError {
    /// File or folder.
    pub path: PathBuf,
    /// What failed.
    pub why: std::io::Error,
}

/// Failed to begin with cuBLAS on a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "begin with cuBLAS of {path}: {why}; does its version fit the driver (`nvidia-smi`), and is there free memory?"
)]
pub struct BlasError {
    /// The library.
    pub path: String,
    /// What failed.
    pub why: String,
}

/// Failed to launch. Nothing was launched, unless the driver says so.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LaunchError {
    /// Too long for the kernels' indices.
    #[error("launch over {0} values: at most 2^31 - 1; split the tensor")]
    TooLong(u64),
    /// Vector loads need it.
    #[error("launch with {what} at {at:#x}: it must be aligned to {need} bytes; copy it, or take the CPU path")]
    Misaligned {
        /// Which buffer.
        what: &'static str,
        /// Its address.
        at: u64,
        /// In bytes.
        need: u64,
    },
    /// A buffer with too little room.
    #[error("launch with {what} of {got} bytes: {need} are needed")]
    TooSmall {
        /// Which buffer.
        what: &'static str,
        /// As given.
        got: u64,
        /// For this call.
        need: u64,
    },
    /// Freed, or of another device or the host.
    #[error("launch with {what}: the driver knows no memory of this device at {at:#x}; was it freed?")]
    NotDevice {
        /// Which buffer.
        what: &'static str,
        /// The address.
        at: u64,
    },
    /// Two buffers that must not share memory do.
    #[error("launch with {0} and {1} in the same memory: they must not overlap")]
    Overlap(&'static str, &'static str),
    /// A parameter outside its range.
    #[error("launch with {what} = {value}: {rule}")]
    Parameter {
        /// Which one.
        what: &'static str,
        /// As given.
        value: f64,
        /// What it must be.
        rule: &'static str,
    },
    /// Half of a step without the half before it.
    #[error("launch {0}: no gradient was compensated before it")]
    Order(&'static str),
    /// cuBLAS refused.
    #[error("multiply matrices: {code}")]
    Blas {
        /// Its function and status.
        code: String,
    },
    /// Two buffers that a copy needs equally long are not.
    #[error("copy {from} bytes to {to}: lengths must be equal")]
    Lengths {
        /// Of the source.
        from: u64,
        /// Of the target.
        to: u64,
    },
    /// The driver refused.
    #[error("launch {kernel}: the CUDA driver says {code}")]
    Driver {
        /// Which kernel.
        kernel: &'static str,
        /// Its error's name.
        code: String,
    },
}
