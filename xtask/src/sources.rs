//! Rules that only the sources show.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

use crate::arrows::{EDGES, PURE, PURE_SOURCES};

/// Names that read a clock, the network, files or ambient randomness.
const AMBIENT: &[&str] = &[
    "std::time::Instant",
    "Instant::now",
    "SystemTime",
    "std::net::Tcp",
    "std::net::Udp",
    "std::net::{",
    "std::process",
    "use std::{",
    "std::fs",
    "std::env",
    "thread_rng",
    "rand::rng()",
    "rand::random",
    "from_os_rng",
    "from_entropy",
    "std::thread::sleep",
];

/// Folders and files that may contain `unsafe`, with the reason beside each in its own header; the last one only
/// names it.
const UNSAFE: &[&str] = &[
    "compression/src/kernels/vectors.rs",
    "compression/src/kernels/x86/",
    "compression/tests/",
    "compression/examples/shared/least.rs",
    "gpu-kernels/src/device/",
    "gpu-kernels/tests/kernels/",
    "probes/src/edge/",
    "agent/src/tc/",
    "python/src/memory.rs",
    "python/src/device.rs",
    "nccl-tuner/src/boundary/",
    "xtask/src/",
];

/// SQL keywords at the head of a statement.
const SQL: &[&str] = &["\"SELECT ", "\"INSERT ", "\"UPDATE ", "\"DELETE FROM", "\"CREATE TABLE", "sqlx::query"];

/// Longest file without its tests.
const MAX_LINES: usize = 800;

/// Every breach as one line.
pub(crate) fn check() -> Result<Vec<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
    let mut breaches = Vec::new();
    for file in rust_files(root)? {
        let shown = file.strip_prefix(root)?.to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file).with_context(|| shown.clone())?;
        breaches.extend(check_file(&shown, &text));
    }
    Ok(breaches)
}

fn check_file(shown: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    let source = without_tests(text);
    let code = |line: &str| !line.trim_start().starts_with("//");
    let pure = PURE.iter().any(|name| shown.starts_with(&format!("{name}/src/")))
        || PURE_SOURCES.iter().any(|place| shown.starts_with(place))
            && !EDGES.iter().any(|place| shown.starts_with(place));
    for (number, line) in source.lines().enumerate().filter(|(_, line)| code(line)) {
        let place = format!("{shown}:{}", number + 1);
        if pure && let Some(word) = AMBIENT.iter().find(|word| line.contains(*word)) {
            breaches.push(format!("{place}: what is pure names {word}"));
        }
        if is_unsafe(line) && !UNSAFE.iter().any(|allowed| shown.starts_with(allowed)) {
            breaches.push(format!("{place}: unsafe outside the modules that may"));
        }
        if SQL.iter().any(|word| line.contains(word)) && !may_have_sql(shown) {
            breaches.push(format!("{place}: SQL outside the controller's store"));
        }
    }
    let lines = source.lines().count();
    if lines > MAX_LINES {
        breaches.push(format!("{shown}: {lines} lines, at most {MAX_LINES} without tests"));
    }
    breaches
}

/// The text with every item under `#[cfg(test)]` blanked, so that line numbers stay.
fn without_tests(text: &str) -> String {
    let mut out = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            out += line;
            out.push('\n');
            continue;
        }
        out.push('\n');
        let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
        for skipped in lines.by_ref() {
            out.push('\n');
            let attribute = skipped.trim_start().starts_with("#[");
            if skipped == end || (!attribute && skipped.trim_end().ends_with(';') && !skipped.contains('{')) {
                break;
            }
            if skipped.trim_end().ends_with("{}") {
                break;
            }
        }
    }
    out
}

fn is_unsafe(line: &str) -> bool {
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"].iter().any(|word| line.contains(word))
}

fn may_have_sql(shown: &str) -> bool {
    shown.starts_with("controller/src/store/") || shown.starts_with("controller/tests/") || shown.starts_with("xtask/")
}

fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut open = vec![root.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    open.push(path);
                }
            } else if name.ends_with(".rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::check_file;

    #[test]
    fn breaches_are_seen() {
        for pure in ["planner/src/x.rs", "exchange/src/x.rs", "trainer/src/control.rs", "probes/src/x/mod.rs"] {
            assert!(check_file(pure, "let t = Instant::now();")[0].contains("pure"), "{pure}");
        }
        for other in ["trainer/src/client.rs", "probes/src/edge/x.rs"] {
            assert!(check_file(other, "let t = Instant::now();").is_empty(), "{other}");
        }
        assert!(check_file("lab/src/x.rs", "unsafe { x() }")[0].contains("unsafe"));
        assert!(check_file("agent/src/x.rs", "q(\"SELECT 1\")")[0].contains("SQL"));
        assert!(check_file("agent/src/x.rs", &"x\n".repeat(900))[0].contains("900 lines"));
    }

    #[test]
    fn tests_and_comments_are_free() {
        let tests = "// Instant::now\n#[cfg(test)]\nmod tests {\n    fn f() { Instant::now(); }\n}\n";
        assert!(check_file("planner/src/x.rs", tests).is_empty());
        let after = format!("#[cfg(test)]\nmod tests;\n{tests}let t = Instant::now();\n");
        assert!(check_file("planner/src/x.rs", &after)[0].starts_with("planner/src/x.rs:8"));
    }
}
