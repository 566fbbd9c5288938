//! How every test says that it has not run; included by the test crates that can lack something.
#![allow(clippy::print_stderr)]

/// Says that a test has not run, and why. With `FLEXCOMM_NO_SKIP=1`, as under `./dev test`, that is a failure.
pub fn skipped(why: &str) {
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    assert!(std::env::var_os("FLEXCOMM_NO_SKIP").is_none_or(|v| v != "1"), "{test} may not be skipped here: {why}");
    eprintln!("SKIPPED {test}: {why}");
}
