//! `flexcomm replay` as users start it: from a controller, from a file, and what it says to bad input.
#![allow(clippy::unwrap_used, missing_docs)]

use flexcomm_domain::{Decision, Link, LinkMatrix, Plan, Seconds, Timestamp, Version};
use flexcomm_planner::{InForce, Links, Snapshot, decide};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

const SEED: u64 = u64::MAX - 1;
const AT: Timestamp = Timestamp(1_790_000_000_000_000);

/// A job of dense alone, whose few values the tree moves fastest.
fn snapshot() -> Snapshot {
    let mut snapshot = Snapshot::new("j".parse().unwrap(), 8, 1000);
    let matrix = LinkMatrix::uniform(8, Link::new(0.01, 1e9).unwrap()).unwrap();
    let age = Seconds::new(0.1).unwrap();
    snapshot.links = Some(Links { matrix, age, oldest: age, confidence: 0.9, tests: Vec::new() });
    snapshot.compute = Some(age);
    snapshot.offer.codecs.clear();
    snapshot
}

/// The same ten seconds after the ring was decided: it is left for the tree.
fn under_the_ring() -> Value {
    let snapshot = snapshot();
    let decision = Decision {
        job: snapshot.job.clone(),
        version: Version(1),
        parent: Version(0),
        plan: Plan::DENSE_RING,
        decided_at: Timestamp(AT.0 - 10_000_000),
        reason: String::new(),
    };
    let in_force = Some(InForce { decision, applied_at_step: Some(1) });
    recorded(2, Snapshot { in_force, ..snapshot }, |_| ())
}

/// What a controller answers of it; the snapshot is changed after the decision.
fn entry(version: u64, change: impl FnOnce(&mut Value)) -> Value {
    recorded(version, snapshot(), change)
}

fn recorded(version: u64, snapshot: Snapshot, change: impl FnOnce(&mut Value)) -> Value {
    let report = decide(&snapshot, AT, &mut ChaCha8Rng::seed_from_u64(SEED)).report;
    let mut stored = serde_json::to_value(snapshot).unwrap();
    change(&mut stored);
    let recorded = json!({ "software": "0.0.9", "seed": SEED, "report": report, "snapshot": stored });
    json!({ "version": version, "recorded": recorded, "missing": null })
}

/// The same, another one, one of another version, a damaged one.
fn entries() -> Vec<Value> {
    vec![
        entry(4, |_| ()),
        entry(3, |stored| stored["gradient_values"] = json!(100_000_000)),
        entry(2, |stored| drop(stored.as_object_mut().unwrap().remove("ranks"))),
        json!({ "version": 1, "recorded": null, "missing": "the snapshot of decision 1 of job j is damaged in the database" }),
    ]
}

fn run(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    // What the checks set for tests is none of the program's, which says so.
    command.arg("replay").args(args).env_remove("FLEXCOMM_CONTROLLER").env_remove("FLEXCOMM_NO_SKIP").output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The entries in a file.
fn file(folder: &Path, entries: &[Value]) -> String {
    let path = folder.join("entries.json");
    std::fs::write(&path, serde_json::to_string_pretty(entries).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Answers two entries a page, until the test ends.
fn serve(entries: Vec<Value>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = String::new();
            BufReader::new(&stream).read_line(&mut request).unwrap();
            let path = request.split(' ').nth(1).unwrap();
            let (path, query) = path.split_once('?').unwrap_or((path, ""));
            let before = query.strip_prefix("before=").map_or(u64::MAX, |version| version.parse().unwrap());
            let (status, body) = if path == "/api/v1/jobs/j/snapshots" {
                let older = entries.iter().filter(|entry| entry["version"].as_u64().unwrap() < before);
                ("200 OK", json!(older.take(2).collect::<Vec<_>>()))
            } else {
                (
                    "404 Not Found",
                    json!({ "type": "t", "title": "t", "status": 404, "detail": "job k: nobody knows it" }),
                )
            };
            let body = body.to_string();
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            stream.write_all((head + &body).as_bytes()).unwrap();
        }
    });
    url
}

#[test]
fn each_decision_has_its_row_and_what_differs() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), &entries());
    let output = run(&["--from", &path]);
    assert!(output.status.success(), "{}", stderr(&output));
    let table = text(&output);
    let now = env!("CARGO_PKG_VERSION");
    for line in [
        &format!("Recorded by flexcomm 0.0.9, decided again by flexcomm {now}."),
        "      4  2026-09-21T14:13:20.000000Z  same           change   none/dense-tree",
        "      3  2026-09-21T14:13:20.000000Z  DIFFERENT      change   none/dense-tree",
        "         rank 1: none/dense-tree -> none/dense-ring",
        "      2  2026-09-21T14:13:20.000000Z  not replayed   change   none/dense-tree",
        "missing field `ranks`",
        "      1  -                            not replayed",
        "         the snapshot of decision 1 of job j is damaged in the database",
        "1 the same, 0 of the same strategy, 1 different, 2 not replayed.",
    ] {
        assert!(table.contains(line), "no {line:?} in\n{table}");
    }
    let rows: Vec<&str> = table.lines().collect();
    let other = rows.iter().position(|row| row.contains("DIFFERENT")).unwrap() + 1;
    let (recorded, again) = (rows[other - 1], rows[other]);
    assert!(again.trim_start().starts_with("now            change") && again.contains("none/dense-ring"), "{table}");
    assert_eq!(again.len(), recorded.len(), "one column below the other:\n{table}");
}

#[test]
fn json_has_all_and_the_status_tells_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), &entries());
    let output = run(&["--from", &path, "--json", "--fail-on-difference"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "flexcomm: of 4 decisions 1 are different and 2 not replayed\n");
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found: Vec<&str> =
        all["replayed"].as_array().unwrap().iter().filter_map(|r| r["comparison"].as_str()).collect();
    assert_eq!(found, ["same", "different", "not-replayed", "not-replayed"]);
    assert_eq!(all["replayed"][0]["now"], all["replayed"][0]["recorded"]);
    assert!(all["replayed"][0]["now"]["t_sync_s"].is_f64(), "{all}");
    assert!(run(&["--from", &path, "--fail-on-difference", "--last", "1"]).status.success());
}

#[test]
fn a_controller_s_pages_are_saved_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let url = serve(entries());
    let saved = folder.path().join("j.json");
    let saved = saved.to_str().unwrap();
    let fetched = run(&["j", "--controller", &url, "--save", saved]);
    assert!(fetched.status.success(), "{}", stderr(&fetched));
    assert_eq!(text(&run(&["--from", saved])), text(&fetched));
    assert!(text(&fetched).contains("1 the same, 0 of the same strategy, 1 different, 2 not replayed"));
    // The seed has more digits than a double.
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(saved).unwrap()).unwrap();
    assert_eq!(kept.as_array().map(Vec::len), Some(4));
    assert_eq!(kept[0]["recorded"]["seed"], SEED);

    let unknown = run(&["k", "--controller", &url]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("404 Not Found: job k: nobody knows it"), "{}", stderr(&unknown));
    let none = run(&["j", "--controller", &serve(vec![])]);
    assert!(none.status.success() && text(&none).contains("Nothing has been decided"), "{}", text(&none));
    let none = run(&["j", "--controller", &serve(vec![]), "--fail-on-difference"]);
    assert_eq!((none.status.code(), stderr(&none)), (Some(1), "flexcomm: there is no decision to replay\n".to_owned()));
    // A file's name that may be a job's, too.
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    command
        .args(["replay", "j.json", "--controller", &url])
        .env_remove("FLEXCOMM_CONTROLLER")
        .env_remove("FLEXCOMM_NO_SKIP");
    let as_job = command.current_dir(folder.path()).output().unwrap();
    assert_eq!(as_job.status.code(), Some(1));
    assert!(stderr(&as_job).contains("404 Not Found") && stderr(&as_job).contains("did you mean --from j.json?"));
}

#[test]
fn another_setting_decides_and_nonsense_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), &[under_the_ring()]);
    let strict = run(&["--from", &path, "--set", "dwell_s=1000"]);
    assert!(text(&strict).contains("Under dwell_s = 1000 in place of what was set."), "{}", text(&strict));
    assert!(text(&strict).contains("now            dwell"), "{}", text(&strict));
    let written = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (object, empty) = (written("object.json", "{}"), written("empty.json", "[]"));
    for (args, status, words) in [
        (&["--from", &path, "--set", "confidense=1"][..], 2, "unknown field `confidense`"),
        (&["--from", &path, "--set", "confidence"], 2, "expected KEY=VALUE"),
        (
            &["--from", &path, "--set", "compressors=[\"topk(k=*)\"]", "--set", "biased_without_memory=false"],
            2,
            "--set compressors=[\"topk(k=*)\"], biased_without_memory=false: ",
        ),
        (&[], 2, "Usage: flexcomm replay [OPTIONS] <JOB>\n       flexcomm replay [OPTIONS] --from <FILE>\n"),
        (&[&path], 2, &format!("did you mean --from {path}?")),
        (&["no/such.json"], 2, "did you mean --from no/such.json?"),
        (&["--from", &object], 1, "invalid type: map, expected a sequence"),
        (
            &["--from", &object],
            1,
            "it must be what --save writes, a JSON list of {\"version\", \"recorded\", \"missing\"}",
        ),
        (&["--from", &empty], 1, "it is an empty list: nothing was decided when it was saved"),
        (&["j", "--from", &path], 2, "cannot be used with"),
        (&["--from", "/nonexistent"], 1, "failed to read --from /nonexistent: No such file"),
        (&["--from", "/dev/null"], 1, "failed to read --from /dev/null: EOF"),
        (&["j", "--controller", "127.0.0.1:1"], 1, "failed to get http://127.0.0.1:1/api/v1/jobs/j/snapshots"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(words), "{args:?}: {}", stderr(&output));
    }
}
