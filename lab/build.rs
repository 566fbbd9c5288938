//! Compiles what is preloaded into user-mode Linux; see `uml/preload.c`.

use std::path::Path;

const SOURCE: &str = "uml/preload.c";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let built = Path::new(&std::env::var_os("OUT_DIR").expect("cargo sets it")).join("preload.so");
    if std::env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        // There is no user-mode Linux for other processors.
        std::fs::write(&built, []).expect("OUT_DIR is writable");
        return;
    }
    let mut compiler = cc::Build::new().opt_level(2).get_compiler().to_command();
    compiler.args(["-shared", "-fPIC", "-o"]).arg(&built).arg(SOURCE).arg("-ldl");
    let status = compiler.status().expect("a C compiler, which Rust links with, too");
    assert!(status.success(), "{compiler:?} failed");
}
