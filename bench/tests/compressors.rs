//! `flexcomm bench compressors` as users start it.
#![allow(clippy::unwrap_used, missing_docs)]

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    command.args(["bench", "compressors"]).args(args).env_remove("FLEXCOMM_PYTHON");
    command
}

fn bench(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn rows(output: &Output) -> Vec<serde_json::Value> {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A program that is no python, but answers as one with torch does: every torch.topk takes a quarter of a second.
fn python(folder: &std::path::Path) -> String {
    let file = folder.join("python");
    let script = "#!/bin/sh\ncase $2 in 'import torch') exit 0 ;; esac\necho $3 > \"$(dirname \"$0\")/threads\"\ncat > /dev/null\necho 0.25\n";
    std::fs::write(&file, script).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn every_method_has_a_row() {
    let rows = rows(&bench(&["--n", "2e3", "--max-time", "1ms", "--json"]));
    let names = flexcomm_compression::methods::all().map(|entry| entry.info.name);
    let methods: Vec<_> = names.chain(["topk(k=0.01)+ef(vanilla)"]).collect();
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

/// Methods whose threshold has the unit of the values, or whose noise depends on their course, send about 1 % in the table,
/// and say that they were made to.
#[test]
fn thresholds_come_from_the_values() {
    let methods = "threshold,hardthreshold,variance,sketched,topk";
    let args = ["--methods", methods, "--n", "1e5"];
    let rows = rows(&bench(&[&args[..], &["--json"]].concat()));
    assert_eq!(rows.len(), 15);
    for row in &rows {
        let method = row["method"].as_str().unwrap();
        let fitted = ["threshold", "hardthreshold", "variance"].iter().any(|name| method.starts_with(name));
        assert_eq!(row["fitted"], fitted, "{row}");
        assert!(!method.starts_with("variance") || method.ends_with("+ef(vanilla)"), "{row}");
        // Values at 4 bytes and indices at about one; signs alone where a threshold stands for the value; a sketch of 5 %.
        let bytes = row["bytes_out"].as_f64().unwrap();
        let each = if method.starts_with("hardthreshold") { 1.15 } else { 5.0 };
        let least = if method.starts_with("sketched") { 6.0 * 4.0 } else { each };
        assert!((0.4..2.5).contains(&(bytes / (1000.0 * least))), "{row}");
        assert!(row["gain"].as_f64().unwrap() > 0.001, "{row}");
    }
    let text = String::from_utf8(bench(&args).stdout).unwrap();
    assert!(text.contains("threshold(v=0.00") && text.contains("+ef(vanilla)* "), "{text}");
    assert!(text.ends_with("* parameters chosen from these values, so that about 1 % of them are sent\n"), "{text}");
}

#[test]
fn a_k_above_n_is_marked() {
    let args = ["--methods", "topk(k=5000),topk(k=10)", "--n", "2e3", "--distributions", "normal", "--max-time", "1ms"];
    let marked: Vec<_> =
        rows(&bench(&[&args[..], &["--json"]].concat())).iter().map(|r| r["keeps_all"].clone()).collect();
    assert_eq!(marked, [true, false]);
    let text = String::from_utf8(bench(&args).stdout).unwrap();
    assert!(text.contains("topk(k=5000)+ ") && text.contains("topk(k=10) "), "{text}");
    assert!(text.ends_with("+ k is above n: all values are kept\n"), "{text}");
}

#[test]
fn strategies_threads_types_and_a_plot() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plot.svg");
    let methods = "topk(k=0.1)+ef(vanilla), signsgd";
    let args = ["--methods", methods, "--n", "1001,5e3", "--distributions", "recorded", "--threads", "2"];
    let more = ["--dtype", "bf16", "--plot", file.to_str().unwrap()];
    let output = bench(&[&args[..], &more].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(text.contains("topk(k=0.1)+ef(vanilla)") && text.contains("bf16"), "{text}");
    // One width for all, the header's too.
    let ends: Vec<_> = text.lines().map(str::len).collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "{text}");
    let svg = std::fs::read_to_string(file).unwrap();
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("fill=\"#4878a8\"").count(), 4);
}

/// Before anything is measured: at sizes that would take minutes.
#[test]
fn what_is_wrong_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (png, lost) = (folder.path().join("a.png"), folder.path().join("nowhere/a.svg"));
    let (png, lost) = (png.to_str().unwrap(), lost.to_str().unwrap());
    for (args, word) in [
        (&["--methods", "topq"][..], "failed to find compressor \"topq\""),
        (&["--methods", "topk(k=2.5)"], "k"),
        (&["--methods", "topk(k=1.0)"], "1.0"),
        (&["--n", "0"], "--n"),
        (&["--n", "abc"], "a whole number of values"),
        (&["--methods", "onebit,,topk"], "an empty name"),
        (&["--limit", "0s"], "--limit 0s leaves no method any time"),
        (&["--python", "/nowhere/python"], "/nowhere/python"),
        (&["--n", "1e8", "--plot", png], "must end in .svg"),
        (&["--n", "1e8", "--plot", lost], "nowhere/a.svg"),
    ] {
        let begun = Instant::now();
        let output = bench(args);
        assert!(!output.status.success());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(word), "{text}");
        assert!(output.stdout.is_empty() && begun.elapsed() < Duration::from_secs(60), "{args:?} was measured");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing was drawn");
}

/// The time of torch.topk is that which its Python says, on as many threads, whether it is named by option or environment.
#[test]
fn ratio_to_torch_is_of_the_python_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let named = python(folder.path());
    let args = ["--methods", "topk,signsgd", "--n", "5e3", "--distributions", "normal", "--threads", "2", "--json"];
    let mut by_option = command(&[&args[..], &["--python", &named]].concat());
    let mut by_environment = command(&args);
    by_environment.env("FLEXCOMM_PYTHON", &named);
    for command in [&mut by_option, &mut by_environment] {
        for row in rows(&command.output().unwrap()) {
            let (ratio, seconds) = (row["ratio_to_torch"].as_f64().unwrap(), row["compress_s"].as_f64().unwrap());
            assert!((ratio - seconds / 0.25).abs() <= 1e-9 * ratio, "{row}");
        }
        let threads = folder.path().join("threads");
        assert_eq!(std::fs::read_to_string(&threads).unwrap(), "2\n");
        std::fs::remove_file(threads).unwrap();
    }
}

/// A method that does not end in time is ended: its row says so, larger sizes of it are not tried, others have their rows.
#[test]
fn slow_methods_do_not_hold_the_table() {
    // Its singular values take minutes at this size.
    let methods = "onebit,atomo(budget=1),signsgd";
    let args =
        ["--methods", methods, "--n", "9e6,1e7", "--distributions", "laplace", "--limit", "5s", "--max-time", "1ms"];
    let begun = Instant::now();
    let rows = rows(&bench(&[&args[..], &["--json"]].concat()));
    assert!(begun.elapsed() < Duration::from_secs(300), "{:?}", begun.elapsed());
    assert_eq!(rows.len(), 6);
    for (i, row) in rows.iter().enumerate() {
        let slow = row["method"].as_str().unwrap().starts_with("atomo");
        assert_eq!(row["n"].as_u64().unwrap(), if i < 3 { 9_000_000 } else { 10_000_000 }, "{row}");
        assert_eq!(row["skipped"].is_string(), slow, "{row}");
        for key in ["gb_per_s", "bytes_out", "gain", "ratio_to_copy", "compress_s", "threads"] {
            assert_eq!(row[key].is_null(), slow, "{key} of {row}");
        }
    }
    let reason = |i: usize| rows.iter().filter(|row| row["skipped"].is_string()).nth(i).unwrap()["skipped"].to_string();
    assert_eq!(reason(0), "\"no row after 5 s (--limit)\"");
    assert_eq!(reason(1), "\"no row after 5 s of n = 9000000 (--limit)\"");
}

fn send(signal: Signal, process: u32) {
    nix::sys::signal::kill(Pid::from_raw(process as i32), signal).unwrap();
}

/// The process that measures, once its n-th method has begun.
fn measuring(parent: &Child, errors: &mut impl Iterator<Item = String>, begun: &str) -> u32 {
    errors.find(|line| line.starts_with(begun)).unwrap();
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.id())).unwrap();
    children.trim().parse().unwrap()
}

fn errors(child: &mut Child) -> impl Iterator<Item = String> + use<> {
    BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap)
}

/// Gone, or a zombie that nobody has asked for.
fn is_gone(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(true, |stat| stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
}

/// However the command ends, what measures ends with it, in the middle of a step too.
#[test]
fn nothing_is_measured_for_a_command_that_was_ended() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut command = command(&["--methods", "atomo(budget=1)", "--n", "9e6", "--distributions", "normal"]);
        let mut child =
            command.args(["--limit", "1000s"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut errors = errors(&mut child);
        let process = measuring(&child, &mut errors, "[1/1]");
        assert!(!is_gone(process));
        send(signal, child.id());
        assert!(!child.wait().unwrap().success());
        let begun = Instant::now();
        while !is_gone(process) && begun.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let gone = is_gone(process);
        if !gone {
            send(Signal::SIGKILL, process);
        }
        assert!(gone, "{signal}: {process} went on");
    }
}

/// A process that ends before any method has begun says nothing about methods: the rest of the case is skipped at once, other
/// cases are measured.
#[test]
fn a_case_that_fails_is_no_methods_fault() {
    // Values of 4 GB do not fit.
    let script = "ulimit -v 3000000; ulimit -c 0; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_flexcomm"), "bench", "compressors", "--json", "--max-time", "1ms"]);
    command.args(["--methods", "onebit,signsgd", "--n", "1e9,1.1e9,1e4", "--distributions", "normal"]);
    let output = command.env_remove("FLEXCOMM_PYTHON").output().unwrap();
    let (rows, errors) = (rows(&output), String::from_utf8(output.stderr).unwrap());
    assert_eq!(rows.len(), 6);
    for (i, row) in rows.iter().enumerate() {
        let skipped = row["skipped"].as_str().unwrap_or_default();
        assert_eq!(skipped.starts_with("nothing of this size and values was measured: "), i < 4, "{row}");
        assert_eq!(row["gain"].is_null(), i < 4, "{row}");
    }
    for n in ["1000000000", "1100000000", "10000"] {
        assert_eq!(errors.matches(&format!("making {n} values")).count(), 1, "{errors}");
    }
}

/// Only methods that had no row in time are left out at larger sizes; not those that failed.
#[test]
fn methods_that_fail_are_tried_again_at_other_sizes() {
    let mut command = command(&["--methods", "atomo(budget=1),onebit", "--n", "9e6,1e7", "--distributions", "normal"]);
    command.args(["--limit", "10s", "--max-time", "1ms", "--json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut errors = errors(&mut child);
    send(Signal::SIGKILL, measuring(&child, &mut errors, "[1/4]"));
    errors.by_ref().find(|line| line.starts_with("[2/4]")).unwrap();
    errors.for_each(drop);
    let rows = rows(&child.wait_with_output().unwrap());
    let reason = |i: usize| rows[i]["skipped"].as_str().unwrap_or_default();
    assert!(reason(0).contains("signal: 9"), "{}", reason(0));
    assert_eq!([reason(1), reason(2), reason(3)], ["", "no row after 10 s (--limit)", ""]);
}

/// What reads rows need not know whether they were measured.
#[test]
fn skipped_rows_have_the_keys_of_measured_ones() {
    let args = ["--n", "9e6", "--distributions", "normal", "--max-time", "1ms", "--limit", "1ms", "--json"];
    let skipped = rows(&bench(&[&args[..], &["--methods", "variance,atomo(budget=1)"]].concat()));
    let measured =
        rows(&bench(&["--n", "1e3", "--distributions", "normal", "--methods", "variance,atomo(budget=1)", "--json"]));
    let keys = |row: &serde_json::Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let named = ["method", "n", "dtype", "distribution", "fitted", "skipped"];
    for (skipped, measured) in skipped.iter().zip(&measured) {
        assert_eq!(keys(skipped), keys(measured));
        assert!(skipped["skipped"].is_string() && measured["skipped"].is_null(), "{skipped} {measured}");
        let nulls = keys(skipped).into_iter().filter(|key| skipped[key].is_null());
        assert!(nulls.eq(keys(skipped).into_iter().filter(|key| !named.contains(&key.as_str()))), "{skipped}");
        assert_eq!(skipped["fitted"], measured["fitted"]);
    }
    assert_eq!(skipped[0]["method"], "variance");
    assert_eq!(skipped[1]["method"], measured[1]["method"]);
}

/// Where the help is wrapped by hand, it is not wrapped again.
#[test]
fn help_fits_its_lines() {
    let text = String::from_utf8(bench(&["--help"]).stdout).unwrap();
    let own = &text[text.find("Columns:").unwrap()..];
    let wide: Vec<_> = own.lines().filter(|line| line.len() > 95).collect();
    assert!(wide.is_empty(), "{wide:#?}");
}

/// Rows come one by one, into a pipe too. Ctrl-C in the middle of a long step: what is done is shown, and the status says
/// that it was not all.
#[test]
fn rows_come_as_they_are_measured_and_ctrl_c_keeps_them() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let methods = "onebit,signsgd,atomo(budget=1),topk";
    for json in [false, true] {
        let mut command =
            command(&["--methods", methods, "--n", "9e6", "--distributions", "normal", "--max-time", "1ms"]);
        command.args(["--limit", "1000s", "--plot", plot.to_str().unwrap()]);
        command.args(json.then_some("--json")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        // The header or the bracket, and two rows, while the third is measured for minutes.
        (0..3).for_each(|_| assert!(out.read_line(&mut text).unwrap() > 0));
        assert!(child.try_wait().unwrap().is_none(), "{text}");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        lines.by_ref().find(|line| line.starts_with("[3/4]")).unwrap();
        send(Signal::SIGINT, child.id());
        assert!(lines.any(|line| line.starts_with("ended before all was done: 2 rows of 4")));
        out.read_to_string(&mut text).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert!(text.contains("onebit") && text.contains("signsgd") && !text.contains("atomo"), "{text}");
        if json {
            assert_eq!(serde_json::from_str::<Vec<serde_json::Value>>(&text).unwrap().len(), 2);
        }
        assert_eq!(std::fs::read_to_string(&plot).unwrap().matches("fill=\"#4878a8\"").count(), 2);
    }
}
