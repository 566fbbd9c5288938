//! The plugin against a real NCCL as far as that goes without a GPU: `tests/host/real_nccl.py`.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use common::{built_alone, skipped};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What `FLEXCOMM_NCCL` names, or NCCL from PyPI where `./dev test` or `python/test` has put it.
fn libraries() -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os("FLEXCOMM_NCCL") {
        return vec![named.into()];
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    let pythons = ["venv-nccl", "venv-python"].map(|venv| target.join(venv).join("lib"));
    let versions = pythons.iter().filter_map(|lib| std::fs::read_dir(lib).ok()).flatten().flatten();
    let paths = versions.map(|python| python.path().join("site-packages/nvidia/nccl/lib/libnccl.so.2"));
    paths.filter(|path| path.is_file()).collect()
}

#[test]
fn a_real_nccl_loads_the_plugin_and_switches_by_it() {
    let libraries = libraries();
    if libraries.is_empty() {
        return skipped("there is no libnccl.so.2 in target/venv-nccl; FLEXCOMM_NCCL can name one");
    }
    let Some(built) = built_alone() else { return skipped("there is no python3 or nm") };
    for library in libraries {
        let log = built.plugin().with_file_name("nccl.log");
        let mut command = Command::new("python3");
        command.arg("-B").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/host/real_nccl.py"));
        command.arg(&library).arg(built.plugin());
        command.env("LD_LIBRARY_PATH", built.plugin().parent().unwrap());
        command.env_remove("NCCL_ALGO").env_remove("NCCL_PROTO").env("NCCL_TUNER_PLUGIN", "flexcomm");
        command.env("NCCL_DEBUG", "INFO").env_remove("NCCL_DEBUG_SUBSYS").env("NCCL_DEBUG_FILE", &log);
        let out = command.output().unwrap();
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{}: {}\n{errors}\n{said}", library.display(), out.status);
        eprintln!("{}", String::from_utf8_lossy(&out.stdout).trim());
        // NCCL's own word that it took the plugin, and ours through its logger.
        for line in
            ["flexcomm: tuner ", "8 ranks on 2 nodes", "allreduce by tree from step 101 on", "ring from step 102"]
        {
            assert!(said.contains(line), "{line:?} in\n{said}");
        }
        assert!(said.contains("Using flexcomm (v") || said.contains("Using tuner plugin flexcomm"), "{said}");
    }
}
