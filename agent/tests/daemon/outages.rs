//! Whole agents in this process against a controller that vanishes, forgets, chokes and contradicts itself.

use crate::support::{Agent, Controller, DEADLINE, Trainer, answer, config, hello, own_address, peer, wait_for};
use flexcomm_domain::{Decision, Timestamp, Version};
use flexcomm_wire::{
    DecisionOrder, FromTrainer, JobOrders, ReportBody, ShapeOrder, ThroughputGrant, ToTrainer, TrialOrder,
};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

fn decision(version: u64, strategy: &str) -> DecisionOrder {
    DecisionOrder::from(&Decision {
        job: "j".parse().unwrap(),
        version: Version(version),
        parent: Version(version - 1),
        plan: strategy.parse().unwrap(),
        decided_at: Timestamp(1),
        reason: "a test".into(),
    })
}

fn job(decision: DecisionOrder) -> JobOrders {
    JobOrders { job: "j".parse().unwrap(), decision: Some(decision), trial: None }
}

const TOPK: &str = "topk@0.01/allgather";
const DENSE: &str = "none@1/dense-ring";

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_that_comes_and_goes_gets_every_report_once_and_in_order() {
    let mut controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    let mut sent = 0;
    for round in 0..4 {
        controller.mood(|mood| mood.lose_acks = round % 2 == 1);
        trainer.steps(sent..sent + 50).await;
        sent += 50;
        wait_for("steps while it is there", || (controller.steps("a").len() as u64 >= sent).then_some(())).await;
        controller.down().await;
        trainer.steps(sent..sent + 50).await;
        sent += 50;
        controller.up().await;
    }
    wait_for("all steps", || (controller.steps("a").len() as u64 >= sent).then_some(())).await;
    assert_eq!(controller.steps("a"), (0..sent).collect::<Vec<_>>());
    assert!(matches!(controller.bodies("a")[0], ReportBody::JobSeen(_)));
    trainer.say(&FromTrainer::Bye).await;
    let left = |body: &ReportBody| matches!(body, ReportBody::JobLeft { rank: 0, .. });
    wait_for("JobLeft", || controller.bodies("a").iter().any(left).then_some(())).await;
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_and_decisions_survive_a_restart_of_the_agent_without_a_controller() {
    let mut controller = Controller::start().await;
    controller.order(|orders| orders.jobs = vec![job(decision(3, TOPK))]);
    let agent = Agent::start(&controller, "a");
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    while trainer.orders.decision.is_none() {
        trainer.orders = trainer.ordered().await;
    }
    controller.down().await;
    trainer.steps(0..100).await;
    trainer.say(&FromTrainer::Bye).await;
    // The last line is handled when the agent has closed the connection.
    assert!(answer(&mut trainer.stream).await.is_none());
    let (config, folder) = agent.end().await;
    assert!(!config.run_dir.join("agent.sock").exists());
    // A reboot empties the tmpfs.
    std::fs::remove_dir_all(&config.run_dir).unwrap();
    let agent = Agent::with(config, folder);
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    assert_eq!(trainer.orders.decision, Some(decision(3, TOPK)));
    trainer.steps(100..120).await;
    controller.up().await;
    wait_for("all steps", || (controller.steps("a").len() == 120).then_some(())).await;
    assert_eq!(controller.steps("a"), (0..120).collect::<Vec<_>>());
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_that_the_controller_cannot_read_holds_up_no_other() {
    let controller = Controller::start().await;
    controller.mood(|mood| mood.choke_on = Some(30));
    let agent = Agent::start(&controller, "a");
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    trainer.steps(0..100).await;
    wait_for("the last", || controller.steps("a").contains(&99).then_some(())).await;
    // Hello has number 1, step s has s + 2; a registration in between announces the job once more, and that may have the number, too.
    let numbers: Vec<u64> = controller.node("a", |node| node.reports.keys().copied().collect());
    let missing: Vec<u64> = (1..=numbers[numbers.len() - 1]).filter(|number| !numbers.contains(number)).collect();
    assert_eq!(missing, [30]);
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_reach_the_trainers_and_only_forward() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let (mut trainer, mut other) = (Trainer::join(&agent, "j", 0).await, Trainer::join(&agent, "j", 1).await);
    assert_eq!(trainer.orders.decision, None);
    controller.order(|orders| orders.jobs = vec![job(decision(5, TOPK))]);
    for trainer in [&mut trainer, &mut other] {
        assert_eq!(trainer.ordered().await, job(decision(5, TOPK)));
    }
    let mut forged = decision(9, TOPK);
    forged.strategy.0 = "topk(k=0.5)+ef(vanilla)/allgather".into();
    controller.order(|orders| orders.jobs = vec![job(forged)]);
    controller.order(|orders| orders.jobs = vec![job(decision(4, DENSE))]);
    let trial =
        TrialOrder { run: None, id: 1, candidates: vec![decision(1, DENSE).strategy], iterations: 10, budget_ms: 1000 };
    controller.order(|orders| {
        orders.jobs = vec![JobOrders { trial: Some(trial.clone()), ..job(decision(5, TOPK)) }];
    });
    let orders = trainer.ordered().await;
    assert_eq!(
        (orders.trial, orders.decision),
        (Some(trial), Some(decision(5, TOPK))),
        "the first that can be followed"
    );
    // Without a stream, polling.
    controller.mood(|mood| mood.no_stream = true);
    let (config, folder) = agent.end().await;
    let agent = Agent::with(config, folder);
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    assert_eq!(trainer.orders.decision, Some(decision(5, TOPK)));
    controller.order(|orders| orders.jobs = vec![job(decision(6, DENSE))]);
    while trainer.orders.decision != Some(decision(6, DENSE)) {
        trainer.orders = trainer.ordered().await;
    }
    agent.end().await;
}

/// What the agent shows under /metrics once `seen` likes it.
async fn scraped(listen: std::net::SocketAddr, seen: impl Fn(&str) -> bool) -> String {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let began = Instant::now();
    loop {
        if let Ok(answer) = client.get(format!("http://{listen}/metrics")).send().await {
            let text = answer.text().await.unwrap();
            if seen(&text) {
                return text;
            }
        }
        assert!(began.elapsed() < DEADLINE, "never seen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_registration_is_told_from_absence_and_tried_again() {
    let controller = Controller::start().await;
    controller.mood(|mood| mood.refuse_register = Some(409));
    let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let listen = std::net::SocketAddr::from((own_address(), 7073));
    let config = flexcomm_agent::Config { metrics_listen: Some(listen), ..config(&controller, "a", folder.path()) };
    let agent = Agent::with(config, folder);
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    trainer.steps(0..10).await;
    let refused = |text: &str| {
        text.contains("\nflexcomm_agent_controller_refusals_total ") && !text.contains("_refusals_total 0\n")
    };
    let text = scraped(listen, refused).await;
    assert!(text.contains("\nflexcomm_agent_controller_errors_total 0\n"), "it answers, so it is not away: {text}");
    controller.mood(|mood| mood.refuse_register = None);
    wait_for("steps", || (controller.steps("a").len() == 10).then_some(())).await;
    assert!(controller.registered("a").await.echo_port != 0);
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_that_forgot_everything_learns_it_again() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let mut trainer = Trainer::join(&agent, "j", 0).await;
    trainer.steps(0..10).await;
    wait_for("steps", || (controller.steps("a").len() == 10).then_some(())).await;
    // Its store is lost: heartbeats answer 404 now.
    controller.shared.nodes.lock().unwrap().clear();
    let seen = |body: &ReportBody| matches!(body, ReportBody::JobSeen(_));
    wait_for("Hello again", || controller.bodies("a").iter().any(seen).then_some(())).await;
    trainer.steps(10..20).await;
    wait_for("new steps", || (controller.steps("a").len() == 10).then_some(())).await;
    assert_eq!(controller.steps("a"), (10..20).collect::<Vec<_>>());
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_agents_measure_each_other() {
    let controller = Controller::start().await;
    let mut agents = Vec::new();
    for (name, addr) in [("a", [127, 0, 0, 1]), ("b", [127, 0, 0, 2])] {
        let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
        let mut config = config(&controller, name, folder.path());
        config.listen = addr.into();
        agents.push(Agent::with(config, folder));
    }
    let peers = [peer(&controller.registered("a").await), peer(&controller.registered("b").await)];
    assert_eq!(peers[1].addr.to_string(), "127.0.0.2");
    let grant = ThroughputGrant { id: 7, peer: "b".parse().unwrap(), budget_bytes: 4 << 20, valid_ms: 20_000 };
    let nobody = ThroughputGrant { id: 8, peer: "z".parse().unwrap(), ..grant.clone() };
    controller.order(|orders| {
        orders.probes.peers = peers.to_vec();
        orders.probes.trace_interval_s = 5;
    });
    for _ in 0..3 {
        // All nodes get the same orders here; only `a` may use the grant towards `b`.
        controller.order(|orders| orders.grants = vec![grant.clone(), nobody.clone()]);
    }
    for (me, other) in [("a", "b"), ("b", "a")] {
        let link = |body| match body {
            ReportBody::Link(link) if link.peer.as_str() == other => Some(link),
            _ => None,
        };
        let link = wait_for("a link report", || controller.bodies(me).into_iter().find_map(link)).await;
        assert!(link.latency_us > 0.0 && link.latency_confidence > 0.0, "{link:?}");
    }
    let tests = || -> Vec<_> {
        let bodies = controller.bodies("a").into_iter();
        bodies.filter_map(|b| if let ReportBody::Throughput(t) = b { Some(t) } else { None }).collect()
    };
    let found = wait_for("both tests", || Some(tests()).filter(|t| t.len() >= 2)).await;
    let done = found.iter().find(|t| t.grant == 7).unwrap();
    assert!(done.error.is_none() && done.out_bps.unwrap() > 0.0 && done.back_bps.unwrap() > 0.0, "{done:?}");
    assert!(done.bytes > 0 && done.bytes <= 4 << 20);
    assert!(found.iter().find(|t| t.grant == 8).unwrap().error.as_ref().unwrap().contains("not in the probe plan"));
    assert_eq!(tests().len(), 2, "a grant was used twice");
    let path = |body| if let ReportBody::Path(path) = body { Some(path) } else { None };
    let path = wait_for("a path", || controller.bodies("a").into_iter().find_map(path)).await;
    assert_eq!(path.hops, [Some([127, 0, 0, 2].into())]);
    for agent in agents {
        agent.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shaping_that_is_not_allowed_is_refused_with_the_remedy() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let shape = ShapeOrder { id: 4, latency_us: 1000.0, jitter_us: 0.0, loss: 0.0, bandwidth_bps: 1e9 };
    controller.order(|orders| orders.shape = Some(shape));
    let shaped = |body| if let ReportBody::Shape(shape) = body { Some(shape) } else { None };
    let report = wait_for("a refusal", || controller.bodies("a").into_iter().find_map(shaped)).await;
    assert!(report.id == 4 && report.error.as_ref().unwrap().contains("allow = true"), "{report:?}");
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_agents_do_not_share_a_folder() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    drop(Trainer::connect(&agent).await);
    let second = Agent::with(agent.config.clone(), agent.folder.clone());
    assert!(second.error().await.contains("another agent that is running uses it"));
    agent.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_served() {
    let controller = Controller::start().await;
    let folder = std::sync::Arc::new(tempfile::tempdir().unwrap());
    let mut config = config(&controller, "a", folder.path());
    let free = std::net::TcpListener::bind((own_address(), 0)).unwrap().local_addr().unwrap();
    config.metrics_listen = Some(free);
    let agent = Agent::with(config, folder);
    controller.registered("a").await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let get = |path: &str| client.get(format!("http://{free}{path}")).send();
    // The controller knows of the agent before the agent has its answer.
    let began = Instant::now();
    loop {
        let text = get("/metrics").await.unwrap().text().await.unwrap();
        if text.contains("flexcomm_agent_registrations_total 1") {
            break;
        }
        assert!(began.elapsed() < DEADLINE, "{text}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let other = get("/other").await.unwrap();
    assert_eq!(other.status(), 404);
    agent.end().await;
}

/// Each start is another instance and names the ones before it, so that its name is free for it at once.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_comes_back_says_who_it_was() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let first = controller.registered("a").await;
    assert!(first.previous.is_empty());
    let (config, folder) = agent.end().await;
    let agent = Agent::with(config, folder);
    let second = || controller.node("a", |n| n.registers.last().cloned()).filter(|r| r.instance != first.instance);
    let second = wait_for("another registration", second).await;
    assert_eq!(second.previous, [first.instance]);
    agent.end().await;
}

/// Not a test of its own: the body of the process below, an agent configured by the file named here.
#[tokio::test(flavor = "multi_thread")]
async fn child_is_an_agent_until_it_is_killed() {
    let Some(file) = std::env::var_os("FLEXCOMM_AGENT_TEST_CHILD") else { return };
    let text = std::fs::read_to_string(file).unwrap();
    let mut config = flexcomm_agent::Config::parse(&text, flexcomm_agent::Overrides::default()).unwrap();
    (config.echo_port, config.throughput_port) = (0, 0);
    flexcomm_agent::run(config, std::future::pending()).await.unwrap();
}

struct Child(std::process::Child);

impl Child {
    fn start(file: &std::path::Path) -> Self {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "outages::child_is_an_agent_until_it_is_killed"])
            .env("FLEXCOMM_AGENT_TEST_CHILD", file);
        Self(command.stdout(std::process::Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_again_and_again_it_loses_nothing_it_took_and_sends_nothing_twice() {
    let mut controller = Controller::start().await;
    let folder = tempfile::tempdir().unwrap();
    let (run_dir, file) = (folder.path().join("run"), folder.path().join("agent.toml"));
    let text = format!(
        "node = \"a\"\ncontroller = \"http://{}\"\ntoken = \"test-token\"\nlisten = \"127.0.0.1\"\n\
         run_dir = {run_dir:?}\nstate_dir = {:?}\n",
        controller.addr,
        folder.path().join("state")
    );
    std::fs::write(&file, text).unwrap();
    let mut sent = 0;
    for round in 0..5 {
        // SIGKILL of the one before, wherever it was in its deliveries.
        let child = Child::start(&file);
        if round % 2 == 1 {
            controller.down().await;
        }
        let mut trainer = Trainer::join_at(&run_dir.join("agent.sock"), "j", 0).await;
        trainer.steps(sent..sent + 200).await;
        sent += 200;
        trainer.say(&FromTrainer::Bye).await;
        // The connection ends when the last line was spooled.
        assert!(answer(&mut trainer.stream).await.is_none());
        drop(child);
        if round % 2 == 1 {
            controller.up().await;
        }
    }
    let _last = Child::start(&file);
    wait_for("all steps", || (controller.steps("a").len() as u64 >= sent).then_some(())).await;
    assert_eq!(controller.steps("a"), (0..sent).collect::<Vec<_>>());
}

/// Another process with the same job and rank is refused; it says so on a socket of its own (python3's).
#[tokio::test(flavor = "multi_thread")]
async fn a_second_connection_of_a_rank_does_not_end_the_first_ones_job() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let mut first = Trainer::join(&agent, "j", 0).await;
    let line = serde_json::to_string(&hello("j", 0)).unwrap();
    let script = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.settimeout(60); s.connect(sys.argv[1]); \
                  s.sendall(sys.argv[2].encode()+b'\\n'); print(s.makefile().readline())";
    let mut other = tokio::process::Command::new("python3");
    let other = other.args(["-c", script]).arg(agent.socket()).arg(line).output().await.unwrap();
    let answered = String::from_utf8(other.stdout).unwrap();
    // A second connection of this process is its own to make; it leaves and the first one is still there.
    drop(Trainer::join(&agent, "j", 0).await);
    first.steps(0..3).await;
    wait_for("steps", || (controller.steps("a").len() == 3).then_some(())).await;
    let left = |bodies: &[ReportBody]| bodies.iter().filter(|b| matches!(b, ReportBody::JobLeft { .. })).count();
    assert_eq!(left(&controller.bodies("a")), 0, "the job ended with a second connection: {answered}");
    let me = format!("process {} of user {}", std::process::id(), nix::unistd::getuid());
    assert!(answered.contains("refused") && answered.contains(&me), "{answered}");
    // A trainer that is started again at once is never locked out by the connection it has just closed.
    for _ in 0..50 {
        drop(first);
        first = Trainer::join(&agent, "j", 0).await;
    }
    drop(first);
    wait_for("the rank has left", || (left(&controller.bodies("a")) > 0).then_some(())).await;
    agent.end().await;
}

/// The first one's trainers live on through the restart, and the second's ask first.
#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_agent_gives_a_run_s_name_to_no_other() {
    let greet = async |agent: &Agent, run| {
        let FromTrainer::Hello { protocol, mut hello } = hello("j", 0) else { unreachable!() };
        hello.run = Some(flexcomm_domain::RunId(run));
        let mut stream = Trainer::connect(agent).await;
        let line = [serde_json::to_vec(&FromTrainer::Hello { protocol, hello }).unwrap(), b"\n".to_vec()].concat();
        stream.get_mut().write_all(&line).await.unwrap();
        (answer(&mut stream).await.unwrap(), stream)
    };
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let (welcome, _first) = greet(&agent, 1).await;
    assert!(matches!(welcome, ToTrainer::Welcome { .. }));
    let (config, folder) = agent.end().await;
    let agent = Agent::with(config, folder);
    match greet(&agent, 2).await.0 {
        ToTrainer::Refused { reason } => assert!(reason.contains("another run (0000000000000001)"), "{reason}"),
        welcome => panic!("{welcome:?}"),
    }
    let (welcome, _first) = greet(&agent, 1).await;
    assert!(matches!(welcome, ToTrainer::Welcome { .. }));
    agent.end().await;
}

/// Sends bytes as they are and reads what comes back until the agent closes.
async fn poke(agent: &Agent, bytes: &[u8]) -> Option<ToTrainer> {
    let mut stream = Trainer::connect(agent).await;
    // The agent may refuse and close while we are still writing.
    let _ = stream.get_mut().write_all(bytes).await;
    let _ = stream.get_mut().shutdown().await;
    answer(&mut stream).await
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_comes_in_by_the_socket_the_next_trainer_is_welcome() {
    let controller = Controller::start().await;
    let agent = Agent::start(&controller, "a");
    let good = [serde_json::to_vec(&hello("j", 1)).unwrap(), b"\n".to_vec()].concat();
    let refused = |answer: Option<ToTrainer>, what: &str| match answer {
        Some(ToTrainer::Refused { reason }) => assert!(reason.contains(what), "{reason}"),
        other => panic!("{other:?}"),
    };
    refused(poke(&agent, b"\xff\x00\n").await, "not a known message");
    refused(poke(&agent, b"{\"kind\":\"bye\"}\n").await, "first line must be a hello");
    refused(poke(&agent, &vec![b'x'; flexcomm_wire::MAX_LINE + 2]).await, "longer than");
    let newer = String::from_utf8(good.clone()).unwrap().replace("\"protocol\":3", "\"protocol\":4");
    refused(poke(&agent, newer.as_bytes()).await, "protocol 4");
    assert!(poke(&agent, b"").await.is_none());
    assert!(matches!(
        poke(&agent, &[good.clone(), b"garbage\n".to_vec()].concat()).await,
        Some(ToTrainer::Welcome { .. })
    ));
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let any_lines = prop::collection::vec(any::<u8>(), 0..2000);
    for greeted in [false, true] {
        for _ in 0..40 {
            let bytes = any_lines.new_tree(&mut runner).unwrap().current();
            let bytes = if greeted { [good.clone(), bytes].concat() } else { bytes };
            let _ = poke(&agent, &bytes).await;
        }
    }
    let mut trainer = Trainer::join(&agent, "j", 1).await;
    trainer.steps(0..5).await;
    wait_for("steps", || (controller.steps("a").len() == 5).then_some(())).await;
    // Every rank that joined and broke off has left; the good one is there.
    let bodies = controller.bodies("a");
    let count = |f: fn(&ReportBody) -> bool| bodies.iter().filter(|b| f(b)).count();
    let seen = count(|b| matches!(b, ReportBody::JobSeen(_)));
    let left = count(|b| matches!(b, ReportBody::JobLeft { .. }));
    assert!(seen >= 41 && left < seen && left >= 1, "{seen} seen, {left} left");
    agent.end().await;
}
