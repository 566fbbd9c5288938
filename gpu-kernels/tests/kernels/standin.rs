//! Whole processes without a GPU: over a stand-in for the driver (`tests/emulator/driver.cpp`), which runs the kernels' own
//! source and lacks what drivers before CUDA 12.8 lack.

use crate::emulated::{self, on_gpu, skipped::skipped};
use flexcomm_gpu_kernels::bench::Bench;
use flexcomm_gpu_kernels::in_environment;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A folder with a libcuda.so.1, built when the first test asks; why there is none.
fn driver() -> Result<&'static Path, &'static str> {
    static ONE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let built = ONE.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("driver-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(|why| why.to_string())?;
        emulated::compile("driver.cpp", &folder.join("libcuda.so.1"))?;
        Ok(folder)
    });
    built.as_ref().map(PathBuf::as_path).map_err(String::as_str)
}

/// NVRTC of the wheel that `./dev test` installs, or of torch's.
fn nvrtc() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    ["venv-nvrtc", "venv-python"].iter().find_map(|venv| in_environment(&target.join(venv)).into_iter().next())
}

/// Runs a test of this program once more, with the stand-in for a GPU.
pub fn again(test: &str) {
    let (Ok(folder), Some(nvrtc)) = (driver().inspect_err(|why| skipped(why)), nvrtc()) else {
        return skipped(
            "no NVRTC: python3 -m venv target/venv-nvrtc && target/venv-nvrtc/bin/pip install nvidia-cuda-nvrtc",
        );
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env("LD_LIBRARY_PATH", folder).env("FLEXCOMM_NVRTC", nvrtc);
    command
        .env("FLEXCOMM_TEST_GPU", "1")
        .env("STANDIN_COMPILES", "1")
        .env("FLEXCOMM_KERNEL_CACHE", folder.join("cubins"));
    let done = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

/// A driver before CUDA 12.8 has no `cuEventElapsedTime_v2`.
#[test]
fn work_is_timed_with_drivers_of_all_versions() {
    if !on_gpu() {
        return again("standin::work_is_timed_with_drivers_of_all_versions");
    }
    let bench = Bench::new(0).unwrap_or_else(|why| panic!("failed to {why}"));
    let values: Vec<f32> = (0..5000).map(|i| (i % 997) as f32 - 498.0).collect();
    let rows = bench.rows(&values, None).unwrap_or_else(|why| panic!("failed to {why}"));
    assert!(rows.iter().all(|row| row.seconds > 0.0), "{rows:?}");
}
