//! What is refused, what is left alone, and what is put back, on this kernel's own veth, htb and pfifo.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

mod tc_common;

use flexcomm_agent::tc::{self, ShapeError, Shaper};
use nix::sys::signal::{Signal, kill};
use std::time::{Duration, Instant};
use tc_common::{Helper, Net, can_make_namespaces, sh, shape};

fn skip() -> bool {
    !can_make_namespaces()
}

/// A helper that keeps a link shaped.
fn shaped(net: &Net) -> Helper {
    let helper = net.helper("hold", &[]);
    helper.wait_for("shaped");
    helper
}

/// `tc -j` of one kind, the numbers in it found by a path like `/0/options/rate`.
/// The guardian removes the journal after the qdisc.
fn no_journal(net: &Net) {
    let start = Instant::now();
    while net.journals() > 0 {
        assert!(start.elapsed() < tc_common::TIMEOUT, "the journal is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn shown(net: &Net, what: &str) -> serde_json::Value {
    serde_json::from_str(&net.tc(&["-j", "-s", what, "show", "dev", "v0"])).unwrap()
}

fn class_line(net: &Net, class: &str) -> String {
    let all = net.tc(&["class", "show", "dev", "v0"]);
    all.lines()
        .find(|l| l.contains(&format!("htb {class} ")))
        .unwrap_or_else(|| panic!("no {class} in {all}"))
        .to_owned()
}

#[test]
fn the_tree_is_what_tc_shows_and_changes_in_place() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0)).unwrap();
        let root = &shown(&net, "qdisc")[0];
        assert_eq!((&root["kind"], &root["handle"]), (&"htb".into(), &"fc01:".into()));
        assert_eq!(root["options"]["default"], "0x10");
        let bulk = class_line(&net, "fc01:10");
        assert!(bulk.contains("prio 1") && bulk.contains("rate 98437Kbit ceil 100Mbit"), "{bulk}");
        let echo = class_line(&net, "fc01:30");
        assert!(echo.contains("prio 0") && echo.contains("rate 1562Kbit ceil 100Mbit"), "{echo}");
        assert!(class_line(&net, "fc01:20").contains("rate 1Tbit ceil 1Tbit"));
        let filters = net.tc(&["filter", "show", "dev", "v0"]);
        assert!(filters.contains("flowid fc01:20") && filters.contains("flowid fc01:30"), "{filters}");

        // Some bytes through, so that recreated classes would show by their counters.
        sh("ip", &["netns", "exec", &net.name, "ping", "-q", "-c", "3", "-i", "0.01", "10.99.0.2"]);
        let sent = |net: &Net| shown(net, "qdisc")[0]["packets"].as_u64().unwrap();
        let packets = sent(&net);
        assert!(packets >= 3);
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 50_000.0)).unwrap();
        assert!(class_line(&net, "fc01:10").contains("ceil 50Gbit"), "the 64-bit rate");
        assert!(sent(&net) >= packets, "the root was recreated");
        shaper.restore().unwrap();
        assert_eq!(net.tree(), before);
        assert_eq!(net.journals(), 0);
        shaper.restore().unwrap();
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 1.0)).unwrap();
        drop(shaper);
        assert_eq!(net.tree(), before, "dropping restores");
    });
}

#[test]
fn refusals_name_what_is_wrong_and_touch_nothing() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let good = shape(0.0, 0.0, 0.0, 100.0);
    let refuse = |change: &dyn Fn(&mut tc::TcConfig), iface: &str, shape: &tc::Shape| {
        let mut config = net.config();
        change(&mut config);
        let error = net.within(|| Shaper::new(config).unwrap().apply(iface, shape).unwrap_err());
        assert_eq!((net.tree(), net.journals()), (before.clone(), 0), "{error}");
        error
    };
    assert!(matches!(refuse(&|c| c.allow = false, "v0", &good), ShapeError::NotAllowed { .. }));
    assert!(matches!(refuse(&|_| {}, "lo", &good), ShapeError::NotListed { .. }));
    let error = refuse(&|c| c.interfaces.push("nope0".into()), "nope0", &good);
    assert!(error.to_string().contains("no such interface"), "{error}");
    let error = refuse(&|_| {}, "v0", &shape(20_000.0, 0.0, 0.0, 100.0));
    assert!(error.to_string().contains("delay in seconds is 20, allowed is 0 to 10"), "{error}");
    sh("ip", &["-n", &net.name, "route", "add", "default", "via", "10.99.0.2"]);
    assert!(matches!(refuse(&|_| {}, "v0", &good), ShapeError::DefaultRoute { .. }));
    let mut config = net.config();
    config.allow_default_route = true;
    net.within(|| Shaper::new(config).unwrap().apply("v0", &good).unwrap());
    let mut config = net.config();
    config.lease = Duration::from_millis(10);
    assert!(matches!(Shaper::new(config), Err(ShapeError::Lease { .. })));
}

/// On a kernel without netem a delay is refused with its name and the remedy, before and after a rate is set.
#[test]
fn a_missing_netem_is_named() {
    if skip() {
        return;
    }
    let net = Net::new();
    let add = ["netns", "exec", &net.name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"];
    if std::process::Command::new("ip").args(add).output().unwrap().status.success() {
        println!("SKIPPED: this kernel has netem; tc_uml covers it");
        return;
    }
    let before = net.tree();
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        let error = shaper.apply("v0", &shape(1.0, 0.0, 0.0, 100.0)).unwrap_err().to_string();
        assert!(error.contains("sch_netem") && error.contains("modprobe"), "{error}");
        assert_eq!((net.tree(), net.journals()), (before.clone(), 0));
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0)).unwrap();
        let tree = net.tree();
        let error = shaper.apply("v0", &shape(0.0, 0.0, 0.5, 100.0)).unwrap_err();
        assert!(matches!(error, ShapeError::MissingModule { module: "sch_netem", .. }), "{error}");
        assert_eq!(net.tree(), tree, "the shape in force stays");
    });
    assert_eq!(net.tree(), before);
}

/// What doctor tells is what tc itself can do here.
#[test]
fn the_kernel_is_judged_by_trying() {
    if skip() {
        return;
    }
    let net = Net::new();
    let tree = net.tree();
    let works = |kind: &[&str]| {
        let add = [&["netns", "exec", &net.name, "tc", "qdisc", "add", "dev", "lo", "root"], kind].concat();
        std::process::Command::new("ip").args(add).output().unwrap().status.success()
    };
    let support = tc::try_kernel().unwrap();
    assert_eq!(support.netem, works(&["netem", "delay", "1ms"]));
    if support.netem {
        sh("ip", &["netns", "exec", &net.name, "tc", "qdisc", "del", "dev", "lo", "root"]);
    }
    assert_eq!(support.htb, works(&["htb"]));
    assert_eq!(net.tree(), tree);
}

/// CAP_NET_ADMIN missing is said so. The helper drops it by setpriv.
#[test]
fn a_missing_capability_is_named() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let output = std::process::Command::new("ip")
        .args(["netns", "exec", &net.name, "setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"])
        .arg(tc_common::HELPER)
        .env(tc_common::ROLE, "hold")
        .env(tc_common::STATE, net.state.path())
        .env(tc_common::IFACE, "v0")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("MissingCapability"), "{said}");
    assert_eq!((net.tree(), net.journals()), (before, 0));
}

#[test]
fn a_foreign_root_is_never_touched() {
    if skip() {
        return;
    }
    let net = Net::new();
    net.tc(&["qdisc", "add", "dev", "v0", "root", "handle", "1:", "htb", "default", "1"]);
    net.tc(&[
        "class", "add", "dev", "v0", "parent", "1:", "classid", "1:1", "htb", "rate", "1gbit", "quantum", "60000",
    ]);
    let before = net.tree();
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        let error = shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0)).unwrap_err().to_string();
        assert!(error.contains("`htb 1:`") && error.contains("tc qdisc del dev v0 root"), "{error}");
        shaper.restore().unwrap();
    });
    assert_eq!((net.tree(), net.journals()), (before.clone(), 0));

    // Somebody replaced ours while it stood: theirs stays when we restore, and our next change is refused.
    net.tc(&["qdisc", "del", "dev", "v0", "root"]);
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0)).unwrap();
        net.tc(&["qdisc", "del", "dev", "v0", "root"]);
        net.tc(&["qdisc", "add", "dev", "v0", "root", "handle", "1:", "htb", "default", "1"]);
        net.tc(&[
            "class", "add", "dev", "v0", "parent", "1:", "classid", "1:1", "htb", "rate", "1gbit", "quantum", "60000",
        ]);
        assert!(matches!(shaper.apply("v0", &shape(0.0, 0.0, 0.0, 9.0)), Err(ShapeError::ForeignQdisc { .. })));
        shaper.restore().unwrap();
    });
    assert_eq!((net.tree(), net.journals()), (before, 0));
}

/// A tree that looks like ours, but no journal speaks of it.
#[test]
fn our_number_without_a_journal_is_foreign() {
    if skip() {
        return;
    }
    let net = Net::new();
    net.tc(&["qdisc", "add", "dev", "v0", "root", "handle", "fc01:", "htb", "default", "10"]);
    let before = net.tree();
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        let error = shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0)).unwrap_err();
        assert!(matches!(error, ShapeError::ForeignQdisc { .. }), "{error}");
    });
    assert_eq!((net.tree(), net.journals()), (before, 0));
}

#[test]
fn a_fifo_that_somebody_set_comes_back_exactly() {
    if skip() {
        return;
    }
    let net = Net::new();
    for kind in [["pfifo", "limit", "77"], ["bfifo", "limit", "77777"]] {
        net.tc(&[&["qdisc", "add", "dev", "v0", "root", "handle", "5:"][..], &kind[..]].concat());
        let before = net.tree();
        let mut helper = shaped(&net);
        assert_ne!(net.tree(), before);
        helper.kill();
        assert!(net.back_within(&before).is_some(), "{}", net.tree());
        net.tc(&["qdisc", "del", "dev", "v0", "root"]);
    }
}

#[test]
fn both_dead_then_the_next_start_restores() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut helper = shaped(&net);
    helper.kill_with_guardians();
    assert_ne!(net.tree(), before, "nobody is left to restore");
    assert_eq!(net.journals(), 1);
    let recovered = net.within(|| tc::recover(net.state.path()).unwrap());
    assert_eq!(recovered.restored, ["v0"]);
    assert_eq!((net.tree(), net.journals()), (before.clone(), 0));

    // Without an explicit recovery the next apply does it, and what it journals is the state before both.
    let mut helper = shaped(&net);
    helper.kill_with_guardians();
    drop(shaped(&net));
    assert!(net.back_within(&before).is_some(), "{}", net.tree());
}

/// A dead guardian is replaced at the next renewal, by one that puts back alone.
#[test]
fn a_killed_guardian_is_replaced() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut helper = shaped(&net);
    let first = helper.guardians();
    assert_eq!(first.len(), 2);
    let tree = net.tree();
    kill(first[0], Signal::SIGKILL).unwrap();
    let start = Instant::now();
    let replaced = loop {
        let new = helper.guardians().into_iter().find(|pid| !first.contains(pid));
        // It watches from the moment it is started; before that it is still this very helper.
        if let Some(new) = new.filter(|new| nix::unistd::getsid(Some(*new)) == Ok(*new)) {
            break new;
        }
        assert!(start.elapsed() < tc_common::TIMEOUT, "no new guardian");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(net.tree(), tree, "the link stays shaped meanwhile");
    kill(helper.pid(), Signal::SIGSTOP).unwrap();
    kill(first[1], Signal::SIGKILL).unwrap();
    assert!(helper.guardians().contains(&replaced));
    helper.kill();
    assert!(net.back_within(&before).is_some(), "{}", net.tree());
}

/// An agent that hangs loses its lease: the link is put back, and the agent is told when it wakes.
#[test]
fn a_lease_that_runs_out_restores() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut config = net.config();
    config.lease = Duration::from_millis(200);
    net.within(|| {
        let mut shaper = Shaper::new(config).unwrap();
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0)).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert!(net.back_within(&before).is_some(), "{}", net.tree());
        let start = Instant::now();
        let error = loop {
            match shaper.renew() {
                Err(error) => break error,
                Ok(()) => assert!(start.elapsed() < tc_common::TIMEOUT, "the loss is never told"),
            }
        };
        assert!(matches!(&error, ShapeError::LeaseLost { ifaces } if ifaces == &["v0"]), "{error}");
        // The guardian that took the lease lets go of its lock a moment after the link is back.
        let mut again = || shaper.apply("v0", &shape(0.0, 0.0, 0.0, 100.0));
        while let Err(error) = again() {
            assert!(matches!(error, ShapeError::Owned { .. }) && start.elapsed() < tc_common::TIMEOUT, "{error}");
        }
    });
    assert!(net.back_within(&before).is_some(), "{}", net.tree());
    no_journal(&net);
}

/// Stopped inside a change, with the lock in hand: the guardian does not wait for it.
#[test]
fn a_stopped_agent_does_not_hold_up_its_guardian() {
    if skip() {
        return;
    }
    let net = Net::new();
    let before = net.tree();
    let mut helper = shaped(&net);
    let section = std::fs::File::options().write(true).open(net.state.path().join("tc-section.lock")).unwrap();
    section.lock().unwrap();
    helper.kill();
    assert!(net.back_within(&before).is_some(), "{}", net.tree());
    assert_eq!(net.journals(), 1, "the second look has to wait");
    drop(section);
    no_journal(&net);
    assert_eq!(net.tree(), before);
}

#[test]
fn two_agents_do_not_share_a_state_directory() {
    if skip() {
        return;
    }
    let net = Net::new();
    let helper = shaped(&net);
    let shaped = net.tree();
    net.within(|| {
        assert!(matches!(tc::recover(net.state.path()), Err(ShapeError::Owned { .. })));
        let mut second = Shaper::new(net.config()).unwrap();
        assert!(matches!(second.apply("v0", &shape(0.0, 0.0, 0.0, 9.0)), Err(ShapeError::Owned { .. })));
    });
    assert_eq!(net.tree(), shaped);
    drop(helper);
}

/// A journal that cannot be read is neither acted upon nor written over.
#[test]
fn an_unreadable_journal_is_kept() {
    if skip() {
        return;
    }
    let net = Net::new();
    let path = net.state.path().join("tc-journal-v0.json");
    let before = net.tree();
    for (text, why) in [("{\"version\":9}", "has version 9"), ("{\"versi", "not a journal")] {
        std::fs::write(&path, text).unwrap();
        let recovered = net.within(|| tc::recover(net.state.path()).unwrap());
        assert!(recovered.restored.is_empty() && recovered.rejected[0].contains(why), "{recovered:?}");
        let error = net.within(|| {
            Shaper::new(net.config()).unwrap().apply("v0", &shape(0.0, 0.0, 0.0, 9.0)).unwrap_err().to_string()
        });
        assert!(error.contains(why), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
    assert_eq!(net.tree(), before);
}

/// A journal of another namespace speaks of another `v0`: this one is left alone.
#[test]
fn a_journal_from_another_namespace_is_rejected() {
    if skip() {
        return;
    }
    let net = Net::new();
    let mut helper = shaped(&net);
    helper.kill_with_guardians();
    let shaped = net.tree();
    let other = Net::new();
    let recovered = other.within(|| tc::recover(net.state.path()).unwrap());
    assert!(recovered.restored.is_empty() && recovered.rejected[0].contains("another network namespace"));
    assert_eq!(net.tree(), shaped);
    let recovered = net.within(|| tc::recover(net.state.path()).unwrap());
    assert_eq!(recovered.restored, ["v0"]);
    assert_ne!(net.tree(), shaped);
}

/// The device went away under us: nothing is left to put back.
#[test]
fn a_device_that_vanishes_is_no_error() {
    if skip() {
        return;
    }
    let net = Net::new();
    net.within(|| {
        let mut shaper = Shaper::new(net.config()).unwrap();
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 9.0)).unwrap();
        sh("ip", &["-n", &net.name, "link", "del", "v0"]);
        shaper.restore().unwrap();
        assert_eq!(net.journals(), 0);
    });
}

/// htb gives a device without a queue one of 1000 packets; that is undone too.
#[test]
fn the_length_of_the_queue_comes_back() {
    if skip() {
        return;
    }
    let net = Net::new();
    sh("ip", &["-n", &net.name, "link", "set", "v0", "txqueuelen", "0"]);
    let queue = || sh("ip", &["-n", &net.name, "-j", "link", "show", "v0"]).contains("\"txqlen\"");
    let before = (net.tree(), queue());
    drop(shaped(&net));
    assert!(net.back_within(&before.0).is_some());
    no_journal(&net);
    assert_eq!((net.tree(), queue()), before);
}
