//! `--print-config` and `--print-sample-config` of controller and agent as users call them.
#![allow(clippy::unwrap_used, missing_docs)]

use std::process::{Command, Output};

fn flexcomm(command: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flexcomm")).arg(command).args(args).output().unwrap()
}

fn controller(args: &[&str]) -> Output {
    flexcomm("controller", args)
}

fn written(text: &[u8]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("controller.toml");
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (folder, path)
}

#[test]
fn the_sample_prints_as_the_default() {
    let sample = controller(&["--print-sample-config"]);
    assert!(sample.status.success());
    let (_folder, path) = written(&sample.stdout);
    let (of_sample, default) = (controller(&["--config", &path, "--print-config"]), controller(&["--print-config"]));
    assert!(of_sample.status.success() && !default.stdout.is_empty(), "{of_sample:?}");
    assert_eq!(of_sample.stdout, default.stdout);
}

#[test]
fn a_configuration_that_cannot_be_used_is_not_printed() {
    for (text, said) in [
        ("[planner]\nconfidence = -1.0", "planner.confidence is -1, allowed is 0.5 to 0.999"),
        ("[planner]\nhysteresis = 0.1", "key `planner.hysteresis` is no longer used; in its place: planner.confidence"),
        ("[loop]\ntick_ms = 1", "`loop.tick_ms` is 1, allowed is 10 to 60000"),
    ] {
        let (_folder, path) = written(text.as_bytes());
        let refused = controller(&["--config", &path, "--print-config"]);
        assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains(said), "{refused:?}");
    }
}

#[test]
fn what_is_no_address_is_told_the_form() {
    let refused = controller(&["--listen", "localhost:7070", "--print-config"]);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{refused:?}");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("expected IP:PORT, for example 127.0.0.1:7070"), "{said}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_flexcomm"));
    let refused = command.args(["controller", "--print-config"]).env("FLEXCOMM_LISTEN", "7070").output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("expected IP:PORT"), "{said}");
}

#[test]
fn an_agents_configuration_is_printed_without_its_token() {
    let printed = flexcomm("agent", &["--node", "a", "--token", "a-test-token", "--print-config"]);
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("node = \"a\"\n") && text.contains("echo_port = 7071\n"), "{text}");
    assert!(!text.contains("a-test-token"), "{text}");
    let refused = flexcomm("agent", &["--node", "a", "--token", "a-test-token", "--echo-port", "0", "--print-config"]);
    assert!(!refused.status.success() && refused.stdout.is_empty(), "{refused:?}");
}
