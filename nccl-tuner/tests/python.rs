//! What the Python package tells the plugin, in one process with a stand-in for NCCL: `python/flexcomm/torch/_tuner.py`
//! needs no torch, and Python can call the plugin's tables as NCCL does.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Built, built, skipped};
use std::path::Path;
use std::process::Command;

/// Runs `tests/host/tuner.py CASE` with these settings; its output when it fails.
fn run(built: &Built, case: &str, plugin: Option<&str>) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("python3");
    command.arg("-B").arg(here.join("tests/host/tuner.py")).arg(case);
    command.arg(here.join("../python/flexcomm/torch/_tuner.py")).arg(built.plugin());
    command.env("LD_LIBRARY_PATH", built.plugin().parent().unwrap());
    command.env_remove("NCCL_ALGO").env_remove("NCCL_PROTO").env_remove("NCCL_TUNER_PLUGIN");
    command.envs(plugin.map(|name| ("NCCL_TUNER_PLUGIN", name)));
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && out.stdout == b"done\n", "{case}: {text}{}", String::from_utf8_lossy(&out.stdout));
}

fn able() -> Option<&'static Built> {
    if !Command::new("python3").arg("--version").output().is_ok_and(|out| out.status.success()) {
        skipped("there is no python3");
        return None;
    }
    built()
}

#[test]
fn python_steers_the_plugin_that_nccl_has_loaded() {
    let Some(built) = able() else { return };
    let path = built.plugin().to_string_lossy().into_owned();
    for name in ["flexcomm", "libnccl-tuner-flexcomm.so", &path] {
        run(built, "steer", Some(name));
    }
}

#[test]
fn without_the_plugin_on_every_rank_python_leaves_nccl_alone() {
    let Some(built) = able() else { return };
    run(built, "agree", Some("flexcomm"));
    // NCCL has loaded it, but not under the name that Python is told.
    run(built, "absent", Some("elsewhere"));
    run(built, "absent", None);
}
