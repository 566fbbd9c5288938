//! The plugin as NCCL meets it: a C program opens it and calls every version of its interface.
#![allow(clippy::unwrap_used)]

mod common;

use common::{COSTS, Host, RING, TREE, VERSIONS, built, picked};

const THREAD: i32 = 0;
const PROCESS: i32 = 1;
const NONE: i32 = -1;

/// A test's body for every version.
fn each_version(body: impl Fn(&mut Host, u32)) {
    let Some(built) = built() else { return };
    for version in VERSIONS {
        let mut host = Host::ready(built, version);
        body(&mut host, version);
        host.end();
    }
}

/// How many entries of the table a preference changes: version 2 has none.
fn one(version: u32) -> usize {
    usize::from(version > 2)
}

#[test]
fn every_version_is_found_by_path_and_by_name() {
    let Some(built) = built() else { return };
    for name in ["flexcomm", "libnccl-tuner-flexcomm.so", &built.plugin().to_string_lossy()] {
        let mut host = Host::start(built, &[]);
        host.ask(&format!("open {name}"));
        for version in VERSIONS {
            assert_eq!(host.ask(&format!("use {version}")), "flexcomm");
        }
        assert!(host.try_ask("use 1").is_err(), "version 1 is older than what is claimed");
        assert!(host.try_ask("use 8").is_err());
        host.end();
    }
    let mut host = Host::start(built, &[]);
    assert!(host.try_ask("open elsewhere").is_err(), "the host can fail to find a plugin");
}

#[test]
fn ring_and_tree_are_switched_in_a_running_process() {
    each_version(|host, version| {
        assert_eq!(host.allreduce(COSTS), (RING, 0), "NCCL's own choice before anything is preferred");
        host.prefer(THREAD, TREE, 10);
        for _ in 0..3 {
            assert_eq!(host.allreduce(COSTS), (TREE, one(version)));
        }
        host.prefer(THREAD, RING, 20);
        assert_eq!(host.allreduce(COSTS), (RING, 0));
        let dear_ring = COSTS.replace("80 30 35", "80 60 55");
        assert_eq!(host.allreduce(&dear_ring), (RING, one(version)), "also where NCCL would take the tree");
        host.prefer(THREAD, NONE, 0);
        assert_eq!(host.allreduce(&dear_ring), (TREE, 0), "and NCCL's own choice again");
        assert_eq!((host.state("asked"), host.state("here")), (7, 7));
        let (steered, same) = if version == 2 { (5, 0) } else { (4, 1) };
        assert_eq!((host.state("steered"), host.state("same"), host.state("left")), (steered, same, 0));
        assert_eq!(host.state("communicators"), 1);
        host.ask("finish 0");
        assert_eq!(host.state("communicators"), 0);
    });
}

#[test]
fn other_collectives_are_nccls_own() {
    each_version(|host, _| {
        host.prefer(THREAD, TREE, 1);
        // Broadcast, Reduce, AllGather, ReduceScatter, and what there is not.
        for function in [0, 1, 2, 3, 5, 8, -1, 1 << 30, i32::MIN] {
            let answer = host.ask(&format!("coll 0 {function} 1048576 7 3 {COSTS}"));
            assert_eq!(picked(&answer), (RING, 0), "function {function}");
        }
        assert_eq!(host.state("asked"), 0);
    });
}

#[test]
fn what_nccl_forbids_stays_forbidden_and_is_said_once() {
    each_version(|host, version| {
        if version == 2 {
            // No table, nothing to see in it: see the next test.
            return;
        }
        host.logs();
        host.prefer(THREAD, TREE, 12);
        let no_tree = COSTS.replace("90 50 40", "-1 -1 -1");
        for _ in 0..4 {
            assert_eq!(host.allreduce(&no_tree), (RING, 0));
        }
        let logs = host.logs();
        assert_eq!(logs.len(), 1, "{logs:?}");
        // NCCL_LOG_WARN, NCCL_INIT | NCCL_TUNING.
        assert!(logs[0].starts_with("2 65 ") && logs[0].contains("step 12 prefers tree"), "{logs:?}");
        assert_eq!(host.state("left"), 4);
        let nothing = vec!["-1"; 21].join(" ");
        assert_eq!(host.allreduce(&nothing), (-1, 0));
        let nvls = COSTS.replace("35 -1 -1 -1 -1 -1 -1 -1 -1 -1", "35 -1 -1 -1 -1 -1 -1 -1 -1 9");
        assert_eq!(host.allreduce(&nvls), (4, 0), "the NVLink switch's reduction stands");
    });
}

#[test]
fn version_2_stands_aside_for_nccls_settings() {
    let Some(built) = built() else { return };
    for (name, expected) in [("NCCL_ALGO", RING), ("NCCL_PROTO", RING), ("NCCL_DEBUG", TREE)] {
        let mut host = Host::start(built, &[(name, "Ring")]);
        host.ask("open flexcomm");
        host.ask("use 2");
        host.ask("init 4 2");
        host.prefer(THREAD, TREE, 3);
        assert_eq!(host.allreduce(COSTS).0, expected, "{name}");
        host.end();
    }
}

#[test]
fn version_2_names_a_protocol_that_works_everywhere() {
    let Some(built) = built() else { return };
    let mut host = Host::ready(built, 2);
    host.prefer(THREAD, TREE, 3);
    for (bytes, expected) in [(8, "0/0"), (32767, "0/0"), (32768, "0/2"), (1 << 30, "0/2")] {
        let answer = host.ask(&format!("coll 0 4 {bytes} 7 3 {COSTS}"));
        assert_eq!(answer, format!("old {expected} new {expected} changed 0"));
    }
    host.end();
}

#[test]
fn tables_of_another_shape_are_never_read_past_their_end() {
    each_version(|host, version| {
        if version == 2 {
            return;
        }
        host.prefer(THREAD, RING, 4);
        // The table ends where memory ends: reading one float too many kills the host.
        for (shape, costs) in [("1 3", "5 6 7"), ("1 1", "5"), ("0 3", ""), ("7 0", ""), ("-1 3", ""), ("7 -3", "")] {
            let answer = host.ask(&format!("coll 0 4 1048576 {shape} {costs}"));
            assert!(answer.ends_with("changed 0"), "{shape}: {answer}");
        }
        for shape in ["2147483647 2147483647", "65536 65536", "1025 1", "-2147483648 -1"] {
            assert!(host.ask(&format!("coll 0 4 1048576 {shape} 5 6 7")).ends_with("changed 0"), "{shape}");
        }
        assert_eq!(host.state("left"), 10);
        let answer = host.ask("coll 0 4 1048576 2 3 1 2 3 4 5 6");
        assert_eq!(picked(&answer), (RING, 1), "a table of just tree and ring is enough");
        let logs = host.logs().join("\n");
        assert!(logs.contains("cost table of 0 algorithms and 3 protocols"), "{logs}");
    });
}

#[test]
fn null_pointers_and_unknown_contexts_leave_nccls_choice() {
    each_version(|host, _| {
        host.prefer(THREAD, TREE, 4);
        host.ask("nulls");
        for context in ["null", "wild"] {
            assert_eq!(picked(&host.ask(&format!("coll {context} 4 1048576 7 3 {COSTS}"))), (RING, 0), "{context}");
        }
        for context in ["wild", "null", "0", "0"] {
            host.ask(&format!("finish {context}"));
        }
        assert_eq!(host.allreduce(COSTS), (RING, 0), "a communicator that has ended");
    });
}

#[test]
fn a_communicator_of_one_rank_is_left_alone() {
    each_version(|host, _| {
        assert_eq!(host.ask("init 1 1"), "1");
        host.prefer(PROCESS, TREE, 4);
        assert_eq!(picked(&host.ask(&format!("coll 1 4 1048576 7 3 {COSTS}"))), (RING, 0));
        assert_eq!(host.state("communicators"), 1);
    });
}

#[test]
fn a_threads_preference_touches_no_other_thread() {
    each_version(|host, version| {
        let elsewhere = |host: &mut Host| picked(&host.ask(&format!("thread 0 4 1048576 7 3 {COSTS}")));
        host.prefer(THREAD, TREE, 4);
        assert_eq!((host.allreduce(COSTS).0, elsewhere(host)), (TREE, (RING, 0)));
        host.prefer(PROCESS, TREE, 5);
        host.prefer(THREAD, RING, 5);
        assert_eq!((host.allreduce(COSTS).0, elsewhere(host)), (RING, (TREE, one(version))));
        host.prefer(PROCESS, NONE, 0);
        assert_eq!((host.allreduce(COSTS).0, elsewhere(host)), (RING, (RING, 0)));
        assert_eq!((host.state("asked"), host.state("here")), (6, 3));
        for refused in ["2 0 0", "-1 0 0", "0 2 0", "1 -2 0"] {
            assert_eq!(host.ask(&format!("prefer {refused}")), "-1");
        }
        assert_eq!((host.state("thread"), host.state("process")), (1, -1));
    });
}

#[test]
fn threads_that_prefer_at_the_same_time_each_get_their_own() {
    each_version(|host, _| {
        host.prefer(PROCESS, TREE, 0);
        host.ask("hammer");
        assert_eq!(host.state("asked"), 80000);
    });
}

#[test]
fn changes_are_said_through_nccls_logger() {
    each_version(|host, version| {
        let logs = host.logs();
        assert_eq!(logs.len(), 1, "{logs:?}");
        // NCCL_LOG_INFO.
        let hello = format!("interface {version}: 4 ranks on 2 nodes");
        assert!(
            logs[0].starts_with("3 65 flexcomm nccl-tuner: flexcomm: tuner ") && logs[0].contains(&hello),
            "{logs:?}"
        );
        for (algorithm, step) in [(TREE, 100), (TREE, 101), (RING, 200), (RING, 201), (TREE, 300)] {
            host.prefer(THREAD, algorithm, step);
            host.allreduce(COSTS);
            host.prefer(THREAD, NONE, 0);
            host.allreduce(COSTS);
        }
        let logs = host.logs();
        let expected = ["tree from step 100", "ring from step 200", "tree from step 300"];
        assert_eq!(logs.len(), 3, "{logs:?}");
        assert!(logs.iter().zip(expected).all(|(log, text)| log.contains(text)), "{logs:?}");
    });
}

#[test]
fn the_preference_lives_as_long_as_somebody_holds_the_plugin() {
    let Some(built) = built() else { return };
    let mut host = Host::ready(built, 5);
    host.prefer(PROCESS, TREE, 7);
    host.ask(&format!("hold {}", built.plugin().display()));
    // NCCL closes the plugin with its last communicator and opens it again for the next one.
    host.ask("finish 0");
    host.ask("close");
    host.ask("open flexcomm");
    host.ask("use 6");
    assert_eq!(host.ask("init 2 2"), "1");
    assert_eq!(picked(&host.ask(&format!("coll 1 4 1048576 7 3 {COSTS}"))).0, TREE);
    host.end();

    let mut alone = Host::ready(built, 5);
    alone.ask("finish 0");
    for _ in 0..3 {
        alone.ask("close");
        alone.ask("open flexcomm");
        alone.ask("use 5");
        alone.ask("init 2 2");
        alone.prefer(THREAD, TREE, 1);
        let number = alone.state("communicators");
        assert!(number >= 1, "unloaded and loaded again without harm");
    }
    alone.end();
}
