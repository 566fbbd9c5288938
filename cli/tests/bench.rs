//! `flexcomm bench compressors` as users start it.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    command.args(["bench", "compressors"]).args(args);
    command
}

fn bench(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn rows(output: &Output) -> Vec<serde_json::Value> {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_method_has_a_row() {
    let rows = rows(&bench(&["--n", "2e3", "--patience", "1ms", "--json"]));
    let methods: Vec<_> = flexcomm_compression::methods::all().map(|entry| entry.name).collect();
    assert_eq!(rows.len(), 3 * methods.len());
    for (i, row) in rows.iter().enumerate() {
        let name = methods[i % methods.len()];
        assert!(row["method"].as_str().unwrap().starts_with(name), "{row}");
        assert_eq!(row["n"], 2000);
        assert_eq!(row["dtype"], "fp32");
        assert_eq!(row["distribution"], ["normal", "laplace", "recorded"][i / methods.len()]);
        for key in ["gb_per_s", "bytes_out", "ratio_to_copy"] {
            assert!(row[key].as_f64().unwrap() > 0.0, "{key} of {row}");
        }
        assert!(row["gain"].as_f64().unwrap() >= 0.0, "{row}");
        assert!(row["ratio_to_torch"].is_null() || row["ratio_to_torch"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn strategies_threads_types_and_a_plot() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plot.svg");
    let methods = "topk(k=0.1)+ef(vanilla),onebit";
    let args = ["--methods", methods, "--n", "1001,5e3", "--distributions", "recorded", "--threads", "2"];
    let more = ["--dtype", "bf16", "--plot", file.to_str().unwrap()];
    let output = bench(&[&args[..], &more].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(text.contains("topk(k=0.1)+ef(vanilla)") && text.contains("bf16"), "{text}");
    let svg = std::fs::read_to_string(file).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("fill=\"#4878a8\"").count(), 4);
}

#[test]
fn what_is_wrong_is_named() {
    for (args, word) in [
        (&["--methods", "topq"][..], "topq"),
        (&["--methods", "topk(k=2.5)"], "k"),
        (&["--n", "0"], "--n"),
        (&["--python", "/nowhere/python"], "/nowhere/python"),
    ] {
        let output = bench(args);
        assert!(!output.status.success());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(word), "{text}");
    }
}

/// Ctrl-C: what is done is shown, and the status is success.
#[test]
fn ctrl_c_shows_what_is_done() {
    let mut child = command(&["--n", "1e6", "--json", "--patience", "1s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    lines.by_ref().find(|line| line.starts_with("[3/")).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::Signal::SIGINT).unwrap();
    assert!(lines.any(|line| line.starts_with("ended before all was done")));
    let rows = rows(&child.wait_with_output().unwrap());
    assert!(rows.len() >= 2 && rows.len() < 3 * flexcomm_compression::methods::all().count());
}
