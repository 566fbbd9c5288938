//! Every kernel compiles with a real NVRTC, for every architecture that we name. No GPU or driver is needed for that.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

#[path = "../../tests/skipped.rs"]
mod skipped;

use flexcomm_gpu_kernels::{Arch, Cache, LoadError, Module, Nvrtc, in_environment, source};
use skipped::skipped;
use std::path::{Path, PathBuf};

/// The one that is named or found, else the wheel in a venv that `./dev test` makes, else torch's in the venv of the
/// Python tests.
fn nvrtc() -> Option<Nvrtc> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let venvs: Vec<PathBuf> =
        ["venv-nvrtc", "venv-python"].iter().flat_map(|venv| in_environment(&target.join(venv))).collect();
    let found = Nvrtc::find().or_else(|_| Nvrtc::first_of(&venvs));
    if let Err(why) = &found {
        let get = "python3 -m venv target/venv-nvrtc && target/venv-nvrtc/bin/pip install nvidia-cuda-nvrtc==13.5.37";
        skipped(&format!("compiling kernels failed to {why}. Get it by: {get}"));
    }
    found.ok()
}

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let Some(nvrtc) = nvrtc() else { return };
    for arch in Arch::TESTED {
        for module in source::MODULES {
            let compiled = nvrtc.compile(module, arch).unwrap();
            assert_eq!(compiled.cubin[..4], *b"\x7fELF", "{} for {}", module.name, arch.sm());
            for kernel in module.kernels {
                assert!(compiled.ptx.contains(&format!(".visible .entry {kernel}(")), "{kernel} in {}", module.name);
                let name = format!(".text.{kernel}\0");
                let code = compiled.cubin.windows(name.len()).any(|bytes| bytes == name.as_bytes());
                assert!(code, "{kernel} has no code for {}", arch.sm());
            }
            let entries = compiled.ptx.matches(".visible .entry ").count();
            assert_eq!(entries, module.kernels.len(), "{}: every kernel is named in source.rs", module.name);
            assert!(!compiled.ptx.contains("fma.rn.f32"), "{}: a product that is not rounded", module.name);
            let slow = compiled.ptx.lines().find(|line| is_loop_of_compare_and_swap(line));
            assert!(slow.is_none(), "{}: {slow:?}", module.name);
            println!("{} {}: {} bytes of cubin", module.name, arch.sm(), compiled.cubin.len());
        }
    }
    println!("NVRTC {} at {}", nvrtc.version(), nvrtc.path());
}

/// Atomics on 64 bits, or on floats, of a block's memory: no architecture has them, and lanes that meet go round one by one.
fn is_loop_of_compare_and_swap(line: &str) -> bool {
    let mut words = line.trim().trim_start_matches(|c| c != 'a' && c != 'r').split('.');
    let atomic = matches!(words.next(), Some("atom" | "red"));
    let is = |wanted: &[&str]| line.split(['.', ' ', '\t']).any(|word| wanted.contains(&word));
    atomic && is(&["shared", "shared::cta"]) && is(&["u64", "s64", "b64", "f32", "f64"])
}

#[test]
fn loops_of_compare_and_swap_are_found() {
    for slow in ["\tatom.shared.add.u64 \t%rd1, [%r1], %rd2;", "@%p1 red.relaxed.cta.shared::cta.add.f32 [%r1], %f1;"] {
        assert!(is_loop_of_compare_and_swap(slow), "{slow}");
    }
    for quick in
        ["\tatom.shared.add.u32 \t%r1, [%r2], 1;", "red.global.add.u64 [%rd1], %rd2;", "\tadd.u64 %rd1, %rd2, 1;"]
    {
        assert!(!is_loop_of_compare_and_swap(quick), "{quick}");
    }
}

#[test]
fn errors_of_the_compiler_are_passed_on() {
    let Some(nvrtc) = nvrtc() else { return };
    let broken =
        Module { name: "broken.cu", text: "#include \"common.cuh\"\nint f() { return nothing; }", kernels: &[] };
    let error = nvrtc.compile(&broken, Arch::new(9, 0)).unwrap_err().to_string();
    assert!(error.contains("compile broken.cu for sm_90") && error.contains("\"nothing\" is undefined"), "{error}");
    for (arch, word) in [(Arch::new(7, 0), "sm_75 or newer"), (Arch::new(99, 0), "newer nvidia-cuda-nvrtc")] {
        let error = nvrtc.compile(&source::MODULES[0], arch).unwrap_err();
        assert!(matches!(error, LoadError::Arch { .. }) && error.to_string().contains(word), "{error}");
    }
}

/// A library that says it is NVRTC of this version, for these architectures.
fn pretended(folder: &Path, (major, minor): (u32, u32), archs: &str) -> Option<PathBuf> {
    let (source, library) = (folder.join("nvrtc.cpp"), folder.join(format!("libnvrtc.so.{major}")));
    let text = format!(
        "static const int archs[] = {{{archs}}};
         extern \"C\" int nvrtcVersion(int* a, int* b) {{ return *a = {major}, *b = {minor}, 0; }}
         extern \"C\" int nvrtcGetNumSupportedArchs(int* n) {{ return *n = sizeof archs / sizeof *archs, 0; }}
         extern \"C\" int nvrtcGetSupportedArchs(int* to) {{ for (int a : archs) *to++ = a; return 0; }}"
    );
    std::fs::write(&source, text).unwrap();
    let built = std::process::Command::new("g++").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    let Ok(status) = built else {
        skipped("there is no g++ to build a pretended NVRTC with: apt-get install g++");
        return None;
    };
    assert!(status.success());
    Some(library)
}

/// Torch's wheel may have one, the toolkit another: the first that the driver takes and that knows the device.
#[test]
fn of_several_compilers_the_one_that_fits_the_driver_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let Some(new) = pretended(folder.path(), (13, 5), "75, 80, 90, 100") else { return };
    let Some(old) = pretended(folder.path(), (12, 4), "75, 80, 90") else { return };
    let both = [folder.path().join("libnvrtc.so.14"), new, old.clone()];
    let version = |major, minor| flexcomm_gpu_kernels::Version { major, minor };
    let of =
        |candidates: &[PathBuf], driver, arch| Nvrtc::fitting_of(candidates, driver, arch).map(|nvrtc| nvrtc.version());
    let (hopper, blackwell) = (Arch::new(9, 0), Arch::new(10, 0));
    assert_eq!(of(&both, version(12, 4), hopper).unwrap(), version(12, 4));
    assert_eq!(of(&both, version(13, 0), hopper).unwrap(), version(13, 5), "cubins load within a major version");
    let turned = [old, both[1].clone()];
    assert_eq!(of(&turned, version(13, 0), hopper).unwrap(), version(12, 4), "in order, where both fit");
    assert_eq!(of(&turned, version(13, 0), blackwell).unwrap(), version(13, 5), "the older does not know it");
    let error = of(&both, version(12, 4), blackwell).unwrap_err().to_string();
    assert!(error.contains("13.5") && error.contains("12.4") && error.contains("too old"), "{error}");
    // One that does not load is no reason to stop at it.
    let broken = folder.path().join("libnvrtc.so.15");
    std::fs::write(&broken, "no library").unwrap();
    let with = [broken, both[1].clone()];
    assert_eq!(of(&with, version(13, 0), hopper).unwrap(), version(13, 5));
}

#[test]
fn what_is_no_nvrtc_is_named_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Nvrtc::first_of(&[folder.path().join("libnvrtc.so.13")]).unwrap_err();
    assert!(matches!(&missing, LoadError::NoNvrtc { tried } if tried.contains("libnvrtc.so.13")), "{missing}");
    assert!(missing.to_string().contains("pip install nvidia-cuda-nvrtc"), "{missing}");
    let file = folder.path().join("libnvrtc.so.12");
    std::fs::write(&file, "no library").unwrap();
    let bad = Nvrtc::first_of(&[file]).unwrap_err();
    assert!(matches!(bad, LoadError::BadNvrtc { .. }), "{bad}");
    // A library of another kind: its functions are missing.
    let other = Nvrtc::first_of(&[PathBuf::from("libc.so.6")]).unwrap_err().to_string();
    assert!(other.contains("use libc.so.6 as NVRTC") && other.contains("nvrtcVersion"), "{other}");
}

#[test]
fn the_key_of_the_cache_tells_modules_architectures_and_compilers_apart() {
    let cache = Cache::at("x");
    let version = |major, minor| flexcomm_gpu_kernels::Version { major, minor };
    let module = &source::MODULES[0];
    let digest = source::digest(module);
    let other = source::digest(&Module { text: "other", ..*module });
    let base = cache.path(module.name, (&digest, "sm_90"), version(13, 2));
    assert_eq!(base, cache.path(module.name, (&source::digest(module), "sm_90"), version(13, 2)));
    assert_ne!(base, cache.path(module.name, (&other, "sm_90"), version(13, 2)));
    assert_ne!(base, cache.path(module.name, (&digest, "sm_80"), version(13, 2)));
    assert_ne!(base, cache.path(module.name, (&digest, "sm_90"), version(13, 5)));
}
